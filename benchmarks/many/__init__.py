"""The cost of many runs, versions and deployed models."""
