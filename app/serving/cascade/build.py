"""Builds the cascade that an endpoint serves from published versions."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.artifacts import DATA
from app.checksums import verify_checksums
from app.config import CascadeConfig, ServeConfig
from app.data.targets import Classes
from app.engines.base import infer_many
from app.errors import RecipeError
from app.published.loaded import LoadedModel, load_model
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.cascade.calibration import calibrate
from app.serving.cascade.rule import CascadeRule
from app.serving.cascade.stages import require_alike
from app.serving.config import Cascade, VersionConfig
from app.storage import to_path
from app.tasks import find_served_task
from app.tensors import OUTPUT, Tensors

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.labelled import LabelledSplit

_TIMED_ROWS, _ROUNDS = 512, 3

Stage = Callable[[Sequence[Tensors]], NDArray[np.float32]]
"""A function that returns the logits of all rows."""


def build_cascade(
    config: CascadeConfig,
    production: VersionConfig,
    serve: ServeConfig,
    storage: UPath,
    cores: Sequence[int] = (),
) -> Cascade:
    """Return the stages before a recipe's own version, and their rule, which this function calibrates.

    Args:
        cores: the cores of each node that may hold replicas. Empty if not known.

    Raises:
        StorageError: a version, or its training data, is missing or was changed.
        RecipeError: two stages are the same version, or one cannot answer in place of the last.
        EngineError: a version cannot run on this machine.
        DataError: there are too few validation rows.
    """
    before = stages_before(config, serve, storage, cores)
    titles = [stage.title for stage in (*before, production)]
    if repeated := [title for title in titles if titles.count(title) > 1]:
        raise RecipeError(
            f"serve.cascade.before makes the stages {', '.join(titles)}, of which {repeated[0]} is one version: name "
            "each once, and not the one in production itself"
        ).of("versions.equal", "serve.cascade.before")
    with ExitStack() as opened:
        # All stages are open at once, because their timings take turns.
        models, stages = [], (*before, production)
        for stage in stages:
            models.append(load_model(storage, stage.name, stage.version, stage.threads, seal=stage.seal))
            opened.callback(models[-1].engine.close)
        # Before the calibration, in which every stage answers every row.
        require_alike(models)
        policies = [stage.policy for stage in stages]
        rule = calibrate_versions(models, policies, load_validation(models[-1].manifest), config.accuracy_floor)
    return Cascade(before=before, rule=rule)


def stages_before(
    config: CascadeConfig, serve: ServeConfig, storage: UPath, cores: Sequence[int] = ()
) -> tuple[VersionConfig, ...]:
    """Verify every file of the stages before the last, and return those stages.

    ``cores`` is as in ``build_cascade``.

    Raises:
        StorageError: a version is missing or was changed.
    """
    return tuple(_version(reference, serve, storage, cores) for reference in config.before)


def load_validation(manifest: Manifest) -> "LabelledSplit":
    """Return the validation split of the run that trained a version.

    Raises:
        RecipeError: the version was imported, so there is no such run.
        StorageError: the run's data is missing or was changed.
    """
    if manifest.lineage.train_run is None:
        raise RecipeError(
            f"serve.cascade: {manifest.name}/{manifest.version} was imported, and a cascade is calibrated on the rows "
            "that its last stage was validated on: take a version that jobs.train and jobs.compile made"
        ).of("version.imported", "serve.cascade")
    folder = to_path(manifest.lineage.train_run) / DATA
    verify_checksums(folder)
    task = find_served_task(manifest.task)
    from app.data.labelled import LabelledData  # other deployments read no data

    data = task.data.load(folder, task.processor, Classes)
    assert isinstance(data, LabelledData)  # ``require_alike`` refuses versions of other tasks
    return data.validation.split


def calibrate_versions(
    models: Sequence[LoadedModel],
    policies: Sequence[BatchingPolicy],
    validation: "LabelledSplit",
    accuracy_floor: float,
) -> CascadeRule:
    """Return the rule of a cascade. The time per row of each stage is measured here, in full calls.

    Args:
        models: the stages in order, which ``require_alike`` accepts, with as many threads as they will serve with.
        policies: the batching policy of each stage.
        validation: rows that none of them was trained on.
        accuracy_floor: minimum accuracy as a share of the last stage's, above 0 and below 1.

    Raises:
        DataError: there are too few rows.
    """
    # Each stage encodes the rows itself, because tokenizers may differ between the stages.
    rows = [[model.natural_processor.encode([item]) for item in validation.inputs] for model in models]
    stages = [partial(_logits, model, policy) for model, policy in zip(models, policies, strict=True)]
    logits = [stage(encoded) for stage, encoded in zip(stages, rows, strict=True)]
    return calibrate(logits, np.array(validation.classes), _seconds_per_row(stages, rows), accuracy_floor)


def _version(reference: str, serve: ServeConfig, storage: UPath, cores: Sequence[int]) -> VersionConfig:
    """Verify and return the version that a recipe calls NAME (its production version) or NAME/VERSION."""
    repository = Repository(storage)
    name, _, number = reference.partition("/")
    manifest = repository.verify(name, int(number) if number else repository.production(name))
    return VersionConfig.of(str(storage), manifest.within(cores), serve)


def _logits(model: LoadedModel, policy: BatchingPolicy, rows: Sequence[Tensors]) -> NDArray[np.float32]:
    answers = infer_many(model.engine, rows, policy.max_rows)
    return np.concatenate([answer[OUTPUT] for answer in answers])


def _seconds_per_row(stages: Sequence[Stage], rows: Sequence[Sequence[Tensors]]) -> list[float]:
    """Return each stage's median over a few rounds. The stages take turns, so that disturbances hit all of them."""
    # Every n-th row instead of the first ones, because data may be sorted by label or length.
    samples = [encoded[:: max(1, len(encoded) // _TIMED_ROWS)] for encoded in rows]
    rounds = [[_seconds(*timed) for timed in zip(stages, samples, strict=True)] for _ in range(_ROUNDS)]
    return (np.median(rounds, axis=0) / len(samples[0])).tolist()  # type: ignore[no-any-return]


def _seconds(stage: Stage, rows: Sequence[Tensors]) -> float:
    began = time.perf_counter()
    stage(rows)
    return time.perf_counter() - began
