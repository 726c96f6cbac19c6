"""Training on a GPU, for tests."""

import sys
from typing import Any

from tests.helpers import result_of, run

_TIMEOUT_S = 150


def train_on_gpu(*overrides: str, processes: int = 1, recipe: str = "recipes/digits.yaml") -> dict[str, Any]:
    """Train in new processes and return the result.

    ``train_alone`` does not work here: it forks a parent that has imported DeepSpeed for CPUs.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", "app.training", recipe, "train.device=gpu", *overrides]
    done = run(*command, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)
