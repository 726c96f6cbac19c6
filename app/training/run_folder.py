"""What a training run keeps in its folder beside its metrics."""

DATA = "data"
"""The prepared data, read by every worker."""

CHECKPOINTS = "checkpoints"
"""One folder for each checkpoint that is kept: the newest ones and the best epoch's."""

WEIGHTS = "weights"
"""The weights of the best epoch."""

WEIGHTS_FILE = "model.safetensors"
"""In it, as Hugging Face names it."""

FAILURE_FILE = "failure.txt"
"""Why a worker ended itself."""
