"""Inference engines: one interface for every runtime of compiled models."""
