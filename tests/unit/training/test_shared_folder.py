"""Workers on nodes that do not share storage."""

import pytest
import torch

from app.storage import to_path
from app.training.coordination.shared_folder import marked, require_shared
from app.training.worker import Worker
from tests.helpers import run
from tests.wording import refused

WORKER = Worker(rank=1, size=2, device=torch.device("cpu"))


@pytest.mark.usefixtures("_process_group")
def test_a_worker_that_does_not_see_the_runs_folder_is_named_with_what_to_set(storage: str) -> None:
    folder = to_path(storage) / "runs/train/run-1"
    with marked(folder) as mark:
        require_shared(WORKER, folder, mark)
        with refused("storage.not_shared", "storage"):
            require_shared(WORKER, folder.parent / "run-2", mark)
    assert not folder.fs.find(folder.path)


@pytest.mark.slow
def test_torchrun_says_so_before_it_trains() -> None:
    """Each process has its own in-memory storage."""
    torchrun = ("torchrun", "--nproc-per-node=2", "-m", "app.training", "recipes/digits.yaml", "storage=memory://own")
    ended = run(*torchrun, environment={"OMP_NUM_THREADS": "1"})
    assert ended.returncode != 0
    assert "error: the nodes do not share storage: rank 1 on " in ended.stderr
    assert "FileNotFoundError" not in ended.stderr
