"""Training over slow networks."""
