"""What tests publish, also from processes of their own: python -m tests.publishing STORAGE '["ACT", "ARGUMENT"]'..."""

import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

from upath import UPath

from app.engines.base import ShapeProfile
from app.repository import version
from app.repository.manifest import EngineKey, Generation, GreedyAgreement, Lineage, ModelCard, ServingDefaults
from app.repository.repository import Repository
from app.repository.score import Score
from app.storage import open_storage, write_atomically
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


GENERATION = Generation(
    context_length=128,
    vocab_size=300,
    end_ids=(0,),
    has_chat=True,
    cache_bytes_per_token=2**16,
    greedy=GreedyAgreement(prompts=1, tokens=1, equal_prompts=1),
)
"""A language model whose longest answer takes 8 MiB of the cache."""


def files_in(folder: Path, model: bytes = b"a model") -> UPath:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model)
    (folder / "labels.json").write_bytes(b"[]")
    return UPath(folder)


def publish_and_promote(repository: Repository, files: str, count: str) -> None:
    for _ in range(int(count)):
        number = repository.publish("toy", UPath(files), CARD).version
        repository.promote("toy", number, "production" if number % 2 else "canary")


def halt(*_: object) -> None:
    """Stop this process, which a test kills then."""
    os.kill(os.getpid(), signal.SIGSTOP)


def publish_until_the_manifest(repository: Repository, files: str) -> None:
    """Publish a version, and halt before the file that makes it one."""

    def write(path: UPath, content: bytes, **options: bool) -> None:
        if path.name == version.MANIFEST_FILE:
            halt()
        write_atomically(path, content, **options)

    with patch.object(version, "write_atomically", write):
        repository.publish("toy", UPath(files), CARD)


def export_until_the_rename(repository: Repository, target: str) -> None:
    """Export a version, and halt before it has its name."""
    with patch.object(type(UPath(target)), "rename", halt):
        repository.export_to_triton("toy", 1, UPath(target))


def delete(repository: Repository, *versions: str) -> None:
    for number in versions:
        repository.delete("toy", int(number))


def act(storage: str, name: str, *arguments: str) -> None:
    repository = Repository(open_storage(storage))
    os.write(1, b"ready\n")  # whole, where others write, too
    sys.stdin.read()  # until the test lets all go at once
    globals()[name](repository, *arguments)


def main() -> None:
    """Run each act in a process. All but the first are forked, because importing takes longer than publishing."""
    _, storage, *acts = sys.argv
    first, *others = (json.loads(given) for given in acts)
    forked = []
    for other in others:
        if not (pid := os.fork()):
            return act(storage, *other)
        forked.append(pid)
    act(storage, *first)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in forked))


if __name__ == "__main__":
    main()
