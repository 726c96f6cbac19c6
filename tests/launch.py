"""Training that a test watches and harms: under torchrun, or as a job on a cluster."""

import contextlib
import hashlib
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from upath import UPath

from app.artifacts import CHECKPOINTS
from app.cluster.state import ClusterState
from app.training.checkpoints.store import CheckpointStore
from tests.helpers import BIN, ROOT, folder_of, latest, records_of, result_of, run, train_alone, wait_until

MARK = "RAYLOOM_TEST"
"""The environment variable that every process of a launch inherits."""
_NUMBERS = ("step", "epoch", "loss", "lr", "grad_norm", "loss_scale", "val_loss", "val_accuracy")
EVERY_STEPS, HANG_TIMEOUT_S = 4, 10.0
INTERRUPTED = ["train.workers=2", "train.epochs=4", "train.early_stopping=null", "train.resume=latest",
               f"train.checkpoint.every_steps={EVERY_STEPS}", "train.checkpoint.num_to_keep=99",
               "model.factory=tests.faults.models:DropoutCnn",
               "model.args.pause_s=0.05"]  # fmt: skip
"""Of the run that is interrupted in every way, and must end as if it had not been."""
STEPS = 88
IMPATIENT = f"train.hang_timeout_s={HANG_TIMEOUT_S}"


class Launched:
    """A command under way; its output is in a file."""

    def __init__(self, folder: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.mark, self.log = uuid.uuid4().hex, folder / f"{uuid.uuid4().hex[:8]}.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def says(self, words: str, timeout_s: float = 300.0, times: int = 1) -> None:
        """Wait until its output has the words, so many times."""
        wait_until(lambda: self.output.count(words) >= times or self.process.poll() is not None, timeout_s)
        assert self.output.count(words) >= times, self.output

    def ends(self, timeout_s: float = 600.0) -> int:
        """Wait for its end; its exit status."""
        return self.process.wait(timeout_s)

    def result(self) -> dict[str, Any]:
        """Wait for its end; the result it printed."""
        self.ends()
        return result_of(self.output)

    def left(self) -> list[psutil.Process]:
        """Its processes, whoever their parent is by now."""
        return processes_where(lambda process: process.environ().get(MARK) == self.mark)

    def ranks(self) -> dict[int, int]:
        """The pid of each rank that torchrun has started. Their children, such as ``tee``, inherit the rank."""
        found = {process.pid: process for process in self.left() if "RANK" in process.environ()}
        own = [process for process in found.values() if process.ppid() not in found]
        return {int(process.environ()["RANK"]): process.pid for process in own}


class Launch:
    """Starts commands for a test, and sees to it that nothing of them is left."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[Launched]()

    def __call__(self, *command: str, **environment: str) -> Launched:
        self._started.append(Launched(self._folder, command, environment))
        return self._started[-1]

    def torchrun(self, *arguments: str, processes: int = 2) -> Launched:
        """Such as ``-m app.training recipes/digits.yaml``; told to end, it soon kills a rank that does not."""
        command = ["torchrun", f"--nproc-per-node={processes}", "--shutdown-timeout=5", *arguments]
        return self(*command)

    def check(self) -> None:
        """No process may run on, and no file may be half written."""
        left = [process for run in self._started for process in run.left()]
        named = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        assert not named
        assert not list(self._folder.rglob("*.tmp"))


class Cluster:
    """A running local cluster, by the environment that reaches it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    @property
    def state(self) -> ClusterState:
        file = Path(self.environment["RAYLOOM_HOME"]) / "cluster/cluster.json"
        return ClusterState.model_validate_json(file.read_bytes())

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those whose command line has all the words."""
        found = []
        for process in self.state.processes():
            with contextlib.suppress(psutil.Error):  # it ended while we looked
                line = " ".join(process.cmdline())
                if all(word in line for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def replicas(self) -> list[psutil.Process]:
        """Of the endpoint."""
        return self.processes("ServeReplica:rayloom:ModelServer")

    def cpus(self) -> tuple[float, float]:
        """Used and all; none, until the cluster has counted them."""
        token = Path(self.environment["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
        answer = httpx.get(
            f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/cluster_status",
            headers={"Authorization": f"Bearer {token}"},
        )
        used, total = answer.json()["data"]["clusterStatus"]["loadMetricsReport"]["usage"].get("CPU", (0.0, 0.0))
        return used, total

    def is_idle(self) -> bool:
        """Whether no training is left in it."""
        return not self.processes("RayTrainWorker") and not self.processes("TrainController") and not self.cpus()[0]


class Job:
    """A training job on a cluster."""

    def __init__(self, cluster: Cluster, launch: Launch, name: str, *overrides: str) -> None:
        self._cluster, self._name = cluster, name
        command = ["rayloom", "submit", "train", "recipes/digits.yaml", *latest([f"name={name}", *overrides])]
        self.client = launch(*command, **cluster.environment)

    @property
    def output(self) -> str:
        return self.client.output

    @property
    def has_ended(self) -> bool:
        return self.client.process.poll() is not None

    def driver(self) -> psutil.Process:
        """The process that runs ``jobs.train``."""
        (found,) = [
            process for process in self._cluster.processes("jobs.train", self._name) if "python" in process.name()
        ]
        return found

    def stop(self) -> None:
        """``ray job stop``."""
        (submission_id,) = re.findall(r"Job '(\S+)' submitted", self.output)
        stopped = run("ray", "job", "stop", submission_id, environment=self._cluster.environment)
        assert stopped.returncode == 0, stopped.stderr


@dataclass(frozen=True)
class Trained:
    """What a run leaves that no clock has a part in; equal to another's if both are the same to the bit."""

    records: list[dict[str, Any]]
    weights: str
    """sha256 of the best epoch's ``model.safetensors``."""
    state: dict[str, str]
    """Of the last checkpoint."""

    @classmethod
    def uninterrupted(cls, folder: Path) -> Self:
        """Of the run that other tests interrupt, when nothing happens to it.

        Its workers have one thread, like all workers of the tests: the number of threads changes how sums are split.
        """
        alone = [f"storage={folder / 'storage'}", "model.args.pause_s=0"]
        trained = cls.of(train_alone(*INTERRUPTED, *alone, processes=2))
        assert [record["step"] for record in trained.records if "loss" in record] == list(range(1, STEPS + 1))
        return trained

    @classmethod
    def of(cls, result: dict[str, Any]) -> Self:
        """Of a run that has succeeded."""
        assert result["status"] == "succeeded", result
        folder = folder_of(result)
        return cls(
            records=numbers_of(folder),
            weights=hashlib.sha256((folder / "weights/model.safetensors").read_bytes()).hexdigest(),
            state=state_of(newest_checkpoint(folder)),
        )


def numbers_of(run_folder: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what was measured of time and memory."""
    return [{key: record[key] for key in _NUMBERS if key in record} for record in records_of(run_folder)]


def state_of(checkpoint: Path) -> dict[str, str]:
    """sha256 of each of a checkpoint's tensors: weights, the optimizer's state, every rank's random numbers."""
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors_of(checkpoint).items()
    }


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, by name."""
    content: dict[str, torch.Tensor] = {}
    _load_state_dict(content, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return content


def newest_step(storage: Path, name: str = "") -> int:
    """Of the newest checkpoint of any run of the recipe that was written whole; 0 if there is none."""
    runs = storage.glob(f"runs/train/*-{name}*")
    return max(
        (checkpoint.step for run in runs for checkpoint in CheckpointStore(UPath(run / CHECKPOINTS)).committed()),
        default=0,
    )


def newest_checkpoint(run_folder: Path) -> Path:
    """The folder of a run's newest checkpoint that was written whole."""
    store = CheckpointStore(UPath(run_folder / CHECKPOINTS))
    return Path(store.folder_of(store.committed()[-1]).path)


def processes_where(matches: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return the running processes that match."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            if matches(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
