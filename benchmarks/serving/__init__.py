"""Rayloom's endpoint beside other model servers."""
