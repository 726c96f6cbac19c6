"""What a training run keeps in its folder beside its metrics."""

DATA = "data"
"""The prepared data, read by every worker."""

CHECKPOINTS = "checkpoints"
"""One folder for each checkpoint that is kept: the newest ones and the best epoch's."""

WEIGHTS = "weights"
"""The weights of the best epoch."""

WEIGHTS_FILE, ARCHITECTURE_FILE = "model.safetensors", "config.json"
"""In it, as Hugging Face names them; the latter of its models only."""

RECIPE_FILE = "recipe.yaml"
"""In it, too."""

FAILURE_FILE = "failure.txt"
"""Why a worker ended itself."""
