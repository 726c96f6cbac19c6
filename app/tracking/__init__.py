"""Copies of runs in tracking servers: MLflow, and Weights & Biases."""
