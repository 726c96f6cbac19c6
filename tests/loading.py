"""Versions of the contract's encoder that tests publish and load."""

from pathlib import Path

import numpy as np
from upath import UPath

from app.data.targets import save_labels
from app.engines.architecture import architecture_of
from app.engines.registry import open_engine
from app.published.loaded import LoadedModel, load_model
from app.repository.known_answers import KnownAnswers
from app.repository.manifest import Manifest, ModelCard
from app.repository.repository import Repository
from app.tensors import OUTPUT, Tensor
from tests.engine_contract import PROCESSOR, SIGNATURE, exported, rows
from tests.publishing import CARD


def model_card(**key: object) -> ModelCard:
    """Of the contract's encoder, as compile would publish it here, but for what ``key`` says."""
    precision = key.get("precision", "fp32")
    here = {
        "engine": "onnxruntime",
        "engine_version": "of another day",
        "architecture": architecture_of("cpu", precision),
        **key,
    }
    return CARD.model_copy(
        update={
            "engine_key": CARD.engine_key.model_copy(update=here),
            "inputs": tuple(map(Tensor.of, SIGNATURE.inputs)),
            "outputs": tuple(map(Tensor.of, SIGNATURE.outputs)),
        }
    )


def publish_encoder(
    repository: Repository, tmp_path: Path, card: ModelCard, *without: str, known: KnownAnswers | None = None
) -> Manifest:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(exported())
    PROCESSOR.save(UPath(folder))
    save_labels(["bad", "neither", "good"], UPath(folder))
    if known is not None:
        known.save(folder)
    for name in without:
        (folder / name).unlink()
    return repository.publish("toy", UPath(folder), card)


def load_encoder(tmp_path: Path) -> LoadedModel:
    return load_model(UPath(tmp_path / "storage"), "toy", 1, threads=1)


def answers_rightly(model: LoadedModel, tmp_path: Path) -> bool:
    """Whether it answers as the published file does."""
    expected = open_engine("onnxruntime", tmp_path / "files/model.onnx").infer(rows(3))[OUTPUT]
    return bool(np.allclose(model.engine.infer(rows(3))[OUTPUT], expected, rtol=0.0, atol=1e-5))
