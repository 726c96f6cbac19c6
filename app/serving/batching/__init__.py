"""Requests that share calls of the engine: what waits is joined when the engine is free to run it."""
