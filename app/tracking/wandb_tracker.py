"""Runs in Weights & Biases, by its client."""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.config import WandbConfig
from app.tracking.tracker import Point, RunEnd, RunFacts

if TYPE_CHECKING:
    import wandb

_INIT_TIMEOUT_S = 10.0
_FINISH_TIMEOUT_S = 10.0


class WandbTracker:
    """Copies runs into a project. Trials and parts of a lifecycle are grouped under the id of what they belong to."""

    name = "wandb"
    has_secret_address = False
    confirms_points = False
    """The client's own process uploads them. W&B leaves out steps that it has, so all may be added again."""

    def __init__(self, config: WandbConfig, folder: str) -> None:
        """``folder`` is a local one, in which the client makes a folder ``wandb``. It uploads from there."""
        self._config, self._folder = config, folder
        self._runs: dict[str, wandb.Run] = {}

    def open(self, facts: RunFacts, run_id: str | None) -> str:
        """Create a run and return its id, which its name gives, or go on with ``run_id``."""
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=_INIT_TIMEOUT_S, finish_timeout=_FINISH_TIMEOUT_S,
            finish_timeout_raises=True, x_disable_stats=True,
        )  # fmt: skip
        new_id = run_id or facts.name.replace("/", "-")
        if new_id in self._runs:  # a later step of opening failed
            return new_id
        run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            dir=self._folder,
            id=new_id,
            name=facts.name,
            group=facts.parent or new_id,
            job_type=facts.job,
            mode=self._config.mode,
            # A process that was killed may have created this run already.
            resume="allow",
            # A search is open at the same time as its trials.
            reinit="create_new",
            save_code=False,
            settings=settings,
        )
        self._runs[new_id] = run
        return new_id

    def describe(self, run_id: str, facts: RunFacts) -> None:
        """Add the run's parameters and lineage to its config."""
        lineage = {f"lineage.{key}": value for key, value in facts.lineage.items()}
        self._runs[run_id].config.update({**facts.parameters, **lineage}, allow_val_change=True)

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Add points. The client writes them to its own file, and uploads them itself."""
        for point in points:
            self._runs[run_id].log(dict(point.values), step=point.step)

    def close(self, run_id: str, end: RunEnd) -> None:
        """End the run, and add its files."""
        run = self._runs.pop(run_id)  # if it cannot be finished, it is of no use any more
        for file in end.files:
            copied = shutil.copy(file, run.dir)  # else the client links to it, and it is gone soon
            run.save(copied, base_path=run.dir, policy="now")
        run.summary.update({**end.metrics, "status": end.status, **end.lineage})
        run.finish(exit_code=int(end.status == "failed"))
