"""Versions of models in storage."""
