"""What a training run keeps in its folder beside its metrics."""

DATA = "data"
"""The prepared data, read by every worker."""

CHECKPOINTS = "checkpoints"
"""One folder for each checkpoint that is kept: the newest ones and the best epoch's."""

WEIGHTS = "weights"
"""The weights of the best epoch."""

WEIGHTS_FILE, ARCHITECTURE_FILE, RECIPE_FILE = "model.safetensors", "config.json", "recipe.yaml"
"""Of the folder of weights; the first two as Hugging Face names them, the second only of models of transformers."""

FAILURE_FILE = "failure.txt"
"""Why a worker ended itself."""
