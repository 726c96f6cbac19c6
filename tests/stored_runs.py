"""Runs as they lie in storage, without the work."""

import json
from collections.abc import Sequence
from typing import Any

from upath import UPath

from app.artifacts import METRICS_FILE
from app.config import dump_recipe, load_recipe
from app.heartbeat import HEARTBEAT_FILE
from app.runs import CONFIG_FILE, RESULT_FILE, Result, runs_folder
from app.telemetry.events import EVENTS_FILE, Event
from tests.helpers import ROOT


def write_run(
    storage: UPath,
    run_id: str,
    *overrides: str,
    job: str = "train",
    metrics: dict[str, Any] | None = None,
    artifacts: dict[str, str] | None = None,
    losses: Sequence[float] = (),
    status: Any = "succeeded",
    error: str | None = None,
    events: Sequence[Event] = (),
) -> UPath:
    """Write a run's recipe, its result, a line for each step and one epoch. ``status`` None: it is under way."""
    folder = runs_folder(storage, job) / run_id
    folder.mkdir(parents=True)
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), [f"storage={storage}", *overrides])
    (folder / CONFIG_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    add_steps(folder, losses)
    (folder / EVENTS_FILE).write_text("".join(f"{event.model_dump_json()}\n" for event in events), encoding="utf-8")
    if status is None:
        (folder / HEARTBEAT_FILE).write_bytes(b"beat")
    else:
        result = Result(
            job=job,
            run_id=run_id,
            recipe=recipe.name,
            status=status,
            duration_s=75,
            metrics=metrics or {},
            artifacts=artifacts or {},
            error=error,
        )
        (folder / RESULT_FILE).write_text(result.model_dump_json(), encoding="utf-8")
    return folder


def add_steps(folder: UPath, losses: Sequence[float], first: int = 1, **metrics: float) -> None:
    """Append a line for each step, and one with ``metrics`` for an epoch that ends with the last of them."""
    records: list[dict[str, Any]] = [
        {"step": step, "epoch": 1, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "memory": {"peak_bytes": 1}}
        for step, loss in enumerate(losses, first)
    ]
    if records:
        phases = {"data": 1.0, "forward": 2.0, "backward": 4.0, "validation": 0.5}
        ended = {"step": records[-1]["step"], "epoch": 1, "val_loss": losses[-1], "val_accuracy": 0.9}
        records.append(ended | metrics | {"train_loss": losses[0], "samples_per_s": 10.0, "phase_s": phases})
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
