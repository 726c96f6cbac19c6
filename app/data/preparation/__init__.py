"""Preparation of data of any size: source → units → survey → shards."""
