"""From a source of examples to batches: cleaned, split, and turned into tensors by one processor."""
