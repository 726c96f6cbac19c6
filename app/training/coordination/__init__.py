"""Coordination of a run's workers: sync, watchdog and the check of shared storage."""
