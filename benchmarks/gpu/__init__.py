"""Measurements that need a GPU, as one script for a bare machine: see README.md."""
