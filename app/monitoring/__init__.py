"""Watching a cluster: Prometheus and Alertmanager with their configuration, what they read of it, and a page."""
