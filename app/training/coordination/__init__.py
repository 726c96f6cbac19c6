"""Coordination of a run's workers: sync, watchdog, heartbeat and the check of shared storage."""
