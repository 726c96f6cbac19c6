"""The cost of many runs, trials, versions and deployed models."""
