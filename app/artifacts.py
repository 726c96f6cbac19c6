"""Names of the files and folders of a training run, which other parts of the library read too."""

DATA = "data"
"""Names of the files and folders of a training run, which other parts of the library read too."""

CHECKPOINTS = "checkpoints"
"""Names of the files and folders of a training run, which other parts of the library read too."""

WEIGHTS = "weights"
"""Names of the files and folders of a training run, which other parts of the library read too."""

FAILURE_FILE = "failure.txt"
"""Names of the files and folders of a training run, which other parts of the library read too."""

WEIGHTS_FILE, ARCHITECTURE_FILE, RECIPE_FILE = "model.safetensors", "config.json", "recipe.yaml"
"""Names of the files and folders of a training run, which other parts of the library read too."""
