"""The endpoint's work without Ray: the Open Inference Protocol, and a model version that answers it."""
