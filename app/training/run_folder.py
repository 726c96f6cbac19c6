"""What a training run keeps in its folder beside its metrics."""

DATA = "data"
"""The prepared data, read by every worker."""

CHECKPOINTS = "checkpoints"
"""One folder for each checkpoint that is kept: the best and the last."""

WEIGHTS = "weights"
"""The weights of the best epoch."""
