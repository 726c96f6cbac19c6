"""What a run records of its steps, and what it hears, also where its storage fails for a while."""

import resource
import time
from pathlib import Path

import pytest
import torch
from upath import UPath

from app.config import AlertConfig, TrainConfig
from app.telemetry.alerts import Action, Alerts, Notifier
from app.training.checkpoints.state import Position
from app.training.coordination.control import CONTROL_FILE, Control, request
from app.training.coordination.exchange import Exchanged, LocalStep
from app.training.engine import StepResult
from app.training.engine.objective import Totals
from app.training.engine.step import Factors
from app.training.records import EpochRecord
from app.training.reporting.metrics_log import MetricsLog
from app.training.reporting.recorder import Recorder
from tests.helpers import records_of

STEPS = 10
"""Of an exchange."""


def report(record: EpochRecord) -> None:
    """Nobody else is told."""


def exchanged(step_s: float) -> Exchanged:
    """Steps of ``step_s`` seconds."""
    result = StepResult(torch.tensor(1.0), Factors(lr=0.1, loss_scale=None), grad_norm=1.0, is_applied=True)
    steps = [LocalStep(0, result, busy_s=0.0, data_s=0.0, seconds=step_s, mfu=None) for _ in range(STEPS)]
    return Exchanged(steps, [1.0] * STEPS, Action.CONTINUE, has_lost_state=False)


def test_a_run_that_becomes_slow_is_noticed_with_its_first_slow_steps() -> None:
    rule = AlertConfig(when="samples_per_s has fallen by 50 %", do=["pause"])
    alerts = Alerts([rule], Notifier(), "run-1", "digits")
    recorder = Recorder(TrainConfig(), torch.device("cpu"), None, report, lambda *_: [alerts], started=0.0)
    recorder.begin(Position(), [])
    recorder.begin_epoch()
    for number, step_s in enumerate([0.1] * 50 + [0.3], start=1):
        assert alerts.pending() is Action.CONTINUE
        recorder.record_steps(Position(step=number * STEPS), exchanged(step_s))
    assert alerts.pending() is Action.PAUSE


def test_a_run_that_was_paused_on_an_epochs_last_batch_still_knows_its_rate() -> None:
    def begin(position: Position) -> Recorder:
        recorder = Recorder(TrainConfig(), torch.device("cpu"), None, report, lambda *_: [], 0.0, clock=lambda: now)
        recorder.begin(position, [])
        recorder.begin_epoch()
        return recorder

    now, position = 100.0, Position()
    recorder = begin(position)
    now = 104.0
    recorder.record_steps(position, exchanged(0.4))
    paused = Position.model_validate_json(position.model_dump_json())
    now = 5000.0  # an hour later, in another process, with no batch left
    validated = Totals(loss=1.0, right=1.0, count=2.0)
    assert begin(paused).make_epoch(paused, validated).samples_per_s == STEPS * 64 / 4.0


def record(step: int) -> EpochRecord:
    return EpochRecord(epoch=step, step=step, train_loss=1.0, val_loss=1.0, val_accuracy=0.5, samples_per_s=1.0)


def test_what_storage_refuses_is_written_with_the_next_and_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = MetricsLog(UPath(tmp_path)), tmp_path / "metrics.jsonl"
    log.append(record(1))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size * 3 // 2, most))  # as a full disk tears a line
    try:
        log.append(record(2))
        log.append(record(3), record(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not file.read_bytes().endswith(b"\n")
    log.append(record(5))
    assert [each["step"] for each in records_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("metrics.jsonl' cannot be written") == 1


def test_a_request_that_cannot_be_read_is_heard_once_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONTROL_FILE).mkdir()
    control = Control(UPath(tmp_path))
    for _ in range(2):
        assert control.asked() is Action.CONTINUE
        time.sleep(1.0)
    (tmp_path / CONTROL_FILE).rmdir()
    request(UPath(tmp_path), Action.PAUSE)
    assert control.asked() is Action.PAUSE
    assert capsys.readouterr().err.count("cannot be read") == 1
