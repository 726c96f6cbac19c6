"""Names of the files and folders of a training run, which other parts of the library also read."""

METRICS_FILE = "metrics.jsonl"
"""One object for each step, one for each epoch."""

DATA = "data"
"""The prepared data."""

CHECKPOINTS = "checkpoints"

WEIGHTS = "weights"
"""The weights of the best epoch."""

ADAPTER = "adapter"
"""The trained adapter of the best epoch, beside the weights it is merged into."""

FAILURE_FILE = "failure.txt"
"""The cause that a worker writes before it ends itself."""

WEIGHTS_FILE, ARCHITECTURE_FILE, RECIPE_FILE = "model.safetensors", "config.json", "recipe.yaml"
"""Files of the weights folder."""

TRIALS = "trials"
"""In the folder of a search: the folder with one subfolder for each trial."""
