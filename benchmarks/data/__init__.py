"""Data that does not fit into memory: prepared, read, and cleaned of near duplicates."""
