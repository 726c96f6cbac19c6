"""What tests publish, also from processes of their own: python -m tests.publishing STORAGE ACT ..."""

import sys
from pathlib import Path

from upath import UPath

from app.engines.base import ShapeProfile
from app.repository.manifest import EngineKey, Lineage, ModelCard, ServingDefaults
from app.repository.repository import Repository
from app.repository.score import Score
from app.storage import open_storage
from app.tensors import Tensor

CARD = ModelCard(
    task="text-classification",
    engine_key=EngineKey(
        onnx_sha256="0",
        precision="fp32",
        engine="openvino",
        engine_version="1",
        device="cpu",
        architecture="x86_64",
        profile=ShapeProfile(batch_sizes=(1, 32), lengths=(16,)),
    ),
    lineage=Lineage(train_run="t", compile_run="c", recipe="r", data_fingerprint="d", code="s"),
    inputs=(Tensor(name="input_ids", dtype="int64", shape=(-1, -1)),),
    outputs=(Tensor(name="logits", dtype="float32", shape=(-1, 2)),),
    serving=ServingDefaults(max_batch_size=32, preferred_batch_sizes=(8, 16), timeout_us=2000, replicas=2, threads=1),
    score=Score(value=0.9),
    max_difference=1e-6,
    cosine=1.0,
)


def files_in(folder: Path, model: bytes = b"a model") -> UPath:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model)
    (folder / "labels.json").write_bytes(b"[]")
    return UPath(folder)


def publish_and_promote(repository: Repository, files: str, count: str) -> None:
    for _ in range(int(count)):
        version = repository.publish("toy", UPath(files), CARD).version
        repository.promote("toy", version, "production" if version % 2 else "canary")


def export(repository: Repository, target: str) -> None:
    repository.export_to_triton("toy", 1, UPath(target))


def delete(repository: Repository, *versions: str) -> None:
    for version in versions:
        repository.delete("toy", int(version))


if __name__ == "__main__":
    _, storage, act, *arguments = sys.argv
    repository = Repository(open_storage(storage))
    print("ready", flush=True)
    sys.stdin.read()  # until the test lets all go at once
    globals()[act](repository, *arguments)
