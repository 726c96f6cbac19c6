"""Data from its source to batches: read, cleaned, split, and turned into tensors by one processor."""
