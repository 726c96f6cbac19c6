"""Preparation of data that do not fit into memory: source → units → survey → shards."""
