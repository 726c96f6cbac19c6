"""Runs of a model that counts the texts that it was trained on, as processes that can be killed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from app.artifacts import CHECKPOINTS, METRICS_FILE, WEIGHTS_FILE
from app.config import Recipe, load_recipe
from app.data.text import TextProcessor
from app.storage import to_path
from app.tasks import prepare
from app.training.checkpoints.store import CheckpointStore
from app.training.data.recipe_order import order_of
from app.training.publication import export_checkpoint
from tests.faults.models import ledger_places

_TIMEOUT_S, _POLL_S = 300.0, 0.02
_TEXTS, _DIGITS, _EPOCHS = 9000, 4, 3
_KEYS = [
    *("data.test_fraction=null", "data.buckets=[8]", "data.tokenizer={vocab_size: 13}", "tune=null", "alerts=[]"),
    *("data.shards={size: 40KB, window: 80KB}", "model.factory=tests.faults.models:CountingText"),
    *("model.args={pause_s: 0.02}", "train.linear_baseline=false", "train.early_stopping=null"),
    *("train.global_batch_size=16", f"train.epochs={_EPOCHS}", "train.schedule={name: constant, warmup_fraction: 0.0}"),
    *("train.resume=latest", "train.checkpoint.every_steps=5", "name=counted"),
]
"""Each text has four digits that identify it to the model."""


def write_digits(file: Path) -> None:
    """Write texts of four digits, which are all different."""
    texts = [" ".join(f"{number:0{_DIGITS}d}") for number in range(_TEXTS)]
    pq.write_table(pa.table({"text": texts, "label": [str(number % 2) for number in range(_TEXTS)]}), file)


@dataclass(frozen=True)
class CountedRun:
    """A run in its own storage. Each start continues it until it ends."""

    source: Path
    storage: Path

    @property
    def recipe(self) -> Recipe:
        """Its recipe."""
        return load_recipe("recipes/reviews.yaml", self._keys())

    def start(self, processes: int, max_steps: int | None = None) -> "subprocess.Popen[bytes]":
        """Start or continue the run with some number of processes. They and their children are one session."""
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        command += ["app.training", "recipes/reviews.yaml", *self._keys()]
        command += [f"train.max_steps={max_steps}"] if max_steps else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (self.storage.with_suffix(".log")).open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def finish(self, processes: int, max_steps: int | None = None) -> None:
        """Continue the run to its end. Raises RuntimeError if it fails."""
        if code := self.start(processes, max_steps).wait(_TIMEOUT_S):
            raise RuntimeError(f"a run ended with {code}: {self.log_end}")

    def _keys(self) -> list[str]:
        return [f"data.source={self.source}", f"storage={self.storage}", *_KEYS]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        (found,) = self.storage.glob("runs/train/*")
        return found

    @property
    def log_end(self) -> str:
        """The last lines that its processes printed."""
        return self.storage.with_suffix(".log").read_text(encoding="utf-8")[-3000:]

    @property
    def step(self) -> int:
        """Step of the newest complete checkpoint; 0 if there is none."""
        runs = list(self.storage.glob("runs/train/*"))
        committed = CheckpointStore(to_path(runs[0] / CHECKPOINTS)).committed() if runs else []
        return max((checkpoint.step for checkpoint in committed), default=0)

    def wait_for(self, step: int, process: "subprocess.Popen[bytes]") -> bool:
        """Wait for a checkpoint of this or a later step. Return whether the run is still under way then."""
        deadline = time.monotonic() + _TIMEOUT_S
        while self.step < step and process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no checkpoint of step {step} after {_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        return process.poll() is None

    def losses(self, first: int, last: int) -> list[tuple[float, float]]:
        """Return the logged loss and gradient norm of each step in a range."""
        lines = (self.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "loss" in record]
        return [(record["loss"], record["grad_norm"]) for record in records if first < record["step"] <= last]

    def counts(self) -> "Counter[int]":
        """Return how often the weights of the newest checkpoint were trained on each text, by number."""
        with tempfile.TemporaryDirectory() as folder:
            weights = to_path(folder) / "weights"
            export_checkpoint(to_path(self.folder), weights)
            processor = TextProcessor.load(weights)
            seen = load_file(str(weights / WEIGHTS_FILE))["seen"]
        texts = [" ".join(f"{number:0{_DIGITS}d}") for number in range(_TEXTS)]
        digits = torch.from_numpy(processor.encode(texts)["input_ids"][:, 1 : 1 + _DIGITS])
        found = seen[ledger_places(digits, processor.facts["vocab_size"])].tolist()
        return Counter({number: times for number, times in enumerate(found) if times})

    def expected_counts(self) -> "Counter[int]":
        """Return how often each text is in the batches of all epochs."""
        data = prepare(self.recipe)
        order = order_of(self.recipe, data)
        texts, _ = data.train.split.take(range(len(data.train)))  # type: ignore[attr-defined]
        numbers = np.array([int(text.replace(" ", "")) for text in texts])
        places = [(epoch, number) for epoch in range(1, _EPOCHS + 1) for number in range(order.num_batches(epoch))]
        return Counter(numbers[np.concatenate([order.batch(*place) for place in places])].tolist())


def kill_one(process: "subprocess.Popen[bytes]", choose: np.random.Generator) -> int:
    """Kill a random rank, wait until all processes of the run have ended, and return the rank."""
    launcher = psutil.Process(process.pid)
    family = launcher.children(recursive=True)
    # Without torchrun the process is the only rank.
    ranks = [child for child in launcher.children() if "torch.distributed.run" in launcher.cmdline()] or [launcher]
    chosen = ranks[int(choose.integers(len(ranks)))]
    rank = int(chosen.environ().get("RANK", 0))
    chosen.send_signal(signal.SIGKILL)
    process.wait(_TIMEOUT_S)
    psutil.wait_procs(family, 30)
    return rank
