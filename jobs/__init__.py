"""What a person submits: ``python -m jobs.NAME RECIPE [key=value …]``."""
