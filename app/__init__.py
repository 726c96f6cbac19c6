"""Rayloom's library: everything that jobs, deployments and the command line are made of."""
