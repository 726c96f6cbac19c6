"""Rayloom's search beside its peers, counted in epochs trained."""
