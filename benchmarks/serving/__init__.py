"""Serving beside its peers."""
