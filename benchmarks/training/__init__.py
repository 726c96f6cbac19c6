"""Training beside its peers: make bench-training."""
