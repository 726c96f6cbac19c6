"""Reporting of a run: measurements, records, metrics files and progress."""
