"""One way to run a compiled model."""
