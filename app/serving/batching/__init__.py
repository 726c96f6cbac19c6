"""Dynamic batching: requests that wait while the engine is busy share its next call."""
