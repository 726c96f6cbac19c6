"""The endpoint without Ray: the Open Inference Protocol, and model versions that answer it."""
