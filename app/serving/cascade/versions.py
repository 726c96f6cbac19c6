"""From published versions to the rule of their cascade."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import verify_checksums
from app.data.classification import ClassificationData, LabelledDataset
from app.errors import RecipeError, StorageError
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.batch import infer_together
from app.serving.cascade.calibration import calibrate
from app.serving.cascade.interface import Interface, require_alike
from app.serving.cascade.rule import CascadeRule
from app.serving.model import LoadedModel
from app.tasks import find_processor
from app.tensors import OUTPUT, Tensors
from app.training.run_folder import DATA

_TIMED_ROWS, _ROUNDS = 512, 3


def find_version(repository: Repository, reference: str) -> tuple[str, int]:
    """Name and number of the version that a recipe calls NAME/NUMBER, NAME/production or NAME/canary.

    Raises:
        StorageError: nothing has the alias. Whether the number is published shows when it is loaded.
    """
    name, _, said = reference.partition("/")
    if said.isdecimal():
        return name, int(said)
    aliases = repository.aliases(name)
    version = {"production": aliases.production, "canary": aliases.canary}[said]
    if version is None:
        raise StorageError(f"model {name!r} has no version that is {said}: promote one, or name a number")
    return name, version


def load_validation(manifest: Manifest) -> LabelledDataset:
    """The validation split of the run that trained a version.

    Raises:
        StorageError: the run's data is not there any more, or was changed.
    """
    folder = UPath(manifest.lineage.train_run) / DATA
    verify_checksums(folder)
    return ClassificationData.load(folder, find_processor(manifest.task)).validation


def calibrated(models: Sequence[LoadedModel], validation: LabelledDataset, floor: float) -> CascadeRule:
    """The rule of a cascade of versions; what a row costs is timed here, in batches as each stage is served.

    Args:
        models: the stages in their order, with as many threads as they will have.
        validation: what none of them was trained on: ``load_validation`` of any.
        floor: least accuracy, as a share of the last stage's, above 0 and below 1.

    Raises:
        RecipeError: the stages are not alike, or were not trained on the same split.
        DataError: there are too few rows.
    """
    require_alike([Interface.of(model) for model in models])
    _require_one_split([model.manifest for model in models])
    rows = [validation.batch([index]).inputs for index in range(len(validation))]
    logits = [_logits(model, rows) for model in models]
    return calibrate(logits, np.array(validation.split.classes), _seconds_per_row(models, rows), floor)


def _require_one_split(manifests: Sequence[Manifest]) -> None:
    """A stage that has seen rows of the validation split is surer of them than it will be of others."""
    *earlier, last = manifests
    for each in earlier:
        if each.lineage.data_fingerprint != last.lineage.data_fingerprint:
            raise RecipeError(
                f"{each.name}/{each.version} and {last.name}/{last.version} were trained on different data or splits, "
                "so that no rows are new to both: train them with the same data section"
            )


def _logits(model: LoadedModel, rows: Sequence[Tensors]) -> NDArray[np.float32]:
    answers = infer_together(model.engine, rows, model.manifest.serving.max_batch_size)
    return np.concatenate([answer[OUTPUT] for answer in answers])


def _seconds_per_row(models: Sequence[LoadedModel], rows: Sequence[Tensors]) -> list[float]:
    """Of each stage the median of a few rounds, in which they take turns."""
    some = rows[:: max(1, len(rows) // _TIMED_ROWS)]
    rounds = [[_seconds(model, some) for model in models] for _ in range(_ROUNDS)]
    return (np.median(rounds, axis=0) / len(some)).tolist()  # type: ignore[no-any-return]


def _seconds(model: LoadedModel, rows: Sequence[Tensors]) -> float:
    began = time.perf_counter()
    _logits(model, rows)
    return time.perf_counter() - began
