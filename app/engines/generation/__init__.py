"""Engines of language models: a prompt in, a stream of tokens out."""
