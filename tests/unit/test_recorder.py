"""What a run's records say of its steps."""

import torch

from app.config import AlertConfig, TrainConfig
from app.telemetry.alerts import Action, Alerts, Notifier
from app.training.checkpoints.state import Position
from app.training.coordination.exchange import Exchanged, LocalStep
from app.training.engine import StepResult
from app.training.engine.step import Factors
from app.training.records import EpochRecord
from app.training.reporting.recorder import Recorder

STEPS = 10
"""Of an exchange."""


def report(record: EpochRecord) -> None:
    """Nobody else is told."""


def exchanged(step_s: float) -> Exchanged:
    """Steps of ``step_s`` seconds."""
    result = StepResult(torch.tensor(1.0), Factors(lr=0.1, loss_scale=None), grad_norm=1.0, is_applied=True)
    steps = [LocalStep(0, result, busy_s=0.0, data_s=0.0, seconds=step_s, mfu=None) for _ in range(STEPS)]
    return Exchanged(steps, [1.0] * STEPS, Action.CONTINUE)


def test_a_run_that_becomes_slow_is_noticed_with_its_first_slow_steps() -> None:
    rule = AlertConfig(when="samples_per_s has fallen by 50 %", do=["pause"])
    alerts = Alerts([rule], Notifier(), "run-1", "digits")
    recorder = Recorder(TrainConfig(), torch.device("cpu"), None, report, lambda *_: [alerts], started=0.0)
    recorder.begin(Position(), [])
    recorder.begin_epoch(Position())
    for number, step_s in enumerate([0.1] * 50 + [0.3], start=1):
        assert alerts.pending() is Action.CONTINUE
        recorder.record_steps(Position(step=number * STEPS), exchanged(step_s))
    assert alerts.pending() is Action.PAUSE
