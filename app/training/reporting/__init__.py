"""What of a run is measured, written down and shown."""
