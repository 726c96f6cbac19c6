"""python -m tests.durable_writes FOLDER: writes three checkpoints and publishes two versions. Run under strace."""

import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from upath import UPath

from app.config import CheckpointConfig
from app.repository.repository import Repository
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from tests.checkpointing import snapshot_at
from tests.publishing import CARD

CHECKPOINTS, PUBLISHED = "run/checkpoints", "published"


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = CheckpointStore(UPath(folder / CHECKPOINTS))
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=1))
    for step in (1, 2, 3):
        writer.save(partial(snapshot_at, step))
    writer.wait()
    files = folder / "files"
    files.mkdir()
    (folder / PUBLISHED).mkdir()
    (files / "model.onnx").write_bytes(b"weights")
    for _ in range(2):
        manifest = Repository(UPath(folder)).publish("digits", UPath(files), CARD)
        (folder / PUBLISHED / str(manifest.version)).mkdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
