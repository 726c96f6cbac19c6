"""Metrics, profiles, evaluations and alerts of a training run."""
