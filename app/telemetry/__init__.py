"""Metrics, profiles and alerts of a training run."""
