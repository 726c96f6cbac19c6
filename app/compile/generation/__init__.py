"""Compilation of a language model into a published version that generates tokens."""
