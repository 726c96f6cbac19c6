"""Models whose weights lie in shards: a network of the digits as large as a test wants it, with its run's folder."""

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from upath import UPath

from app.checksums import verify_checksums
from app.config import Recipe, load_recipe
from app.models.factory import blueprint_of
from app.published.weights import publish_weights
from app.tasks import find_task
from tests.compiling import DIGITS
from tests.helpers import train_alone


class DeepMlp(nn.Module):
    """Fully connected layers of one width."""

    def __init__(self, num_labels: int, channels: int, width: int, layers: int) -> None:
        super().__init__()
        hidden = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * channels, width), nn.ReLU(), *hidden, nn.Linear(width, num_labels)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.layers(pixel_values)
        return logits


def shaped(width: int, layers: int) -> list[str]:
    """Return the overrides of the digits' recipe for such a network."""
    return ["model.factory=tests.large_models:DeepMlp", f"model.args={{width: {width}, layers: {layers}}}"]


def random_run(storage: Path, width: int, layers: int) -> UPath:
    """Return the weights folder of a run that ended with random weights, which are never in memory together.

    Training a model of this size would take four times its weights.
    """
    trained = train_alone(f"storage={storage}", "train.max_steps=1", "data.validation_fraction=0.08", *shaped(8, 1))
    run = UPath(trained["artifacts"]["weights"]).parent
    verify_checksums(run / "data")
    recipe = load_recipe(DIGITS, shaped(width, layers))
    data = find_task(recipe.task).load(recipe, run / "data")
    (run / "weights").rename(run / "small")
    publish_weights(lambda path: _write_random(path, recipe, data.facts), data, recipe, run / "weights")
    return run / "weights"


def _write_random(path: Path, recipe: Recipe, facts: Mapping[str, int]) -> None:
    """Write a safetensors file one tensor at a time."""
    shapes = {name: tuple(value.shape) for name, value in blueprint_of(recipe.model, facts).model.state_dict().items()}
    ends = list(accumulate(4 * math.prod(shape) for shape in shapes.values()))
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [end - 4 * math.prod(shape), end]}
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }
    content, generator = json.dumps(header).encode(), np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for shape in shapes.values():
            # He's scale, with which the outputs of all layers are about as large.
            scale = math.sqrt(2 / shape[-1]) if len(shape) > 1 else 0.01
            file.write((np.float32(scale) * generator.standard_normal(shape, np.float32)).data)
