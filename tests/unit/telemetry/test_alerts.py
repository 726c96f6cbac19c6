"""When alerts fire, on sequences worked out by hand, and what they ask of the loop."""

from collections.abc import Iterable
from math import inf, nan

import pytest
import yaml

from app.config import AlertConfig
from app.config.alerts import Act
from app.config.notify import ReceiverConfig
from app.telemetry.alerts import Alerts, Notification, Notifier
from app.telemetry.alerts.notifier import Outbox
from app.telemetry.record import Record
from tests.helpers import wait_until

STEADY = [100.0] * 20


class Kept:
    """A receiver that keeps what it gets."""

    name = "kept"

    def __init__(self) -> None:
        self.notifications: list[Notification] = []

    def send(self, notification: Notification) -> None:
        self.notifications.append(notification)


def alert(rule: str, *do: Act) -> AlertConfig:
    """Return an alert whose rule is given as keys in YAML."""
    return AlertConfig.model_validate({**yaml.safe_load(f"{{{rule}}}"), "do": [*do]})


class Bench:
    """Alerts with a receiver that keeps, and a clock that stands still until it is set."""

    def __init__(self, *rules: str, do: Iterable[Act] = ("notify",)) -> None:
        self.now_s, self.kept = 0.0, Kept()
        alerts = [alert(rule, *do) for rule in rules]
        notifier = Notifier([Outbox(self.kept, ReceiverConfig())])
        self.alerts = Alerts(alerts, notifier, "run-1", "digits", clock=lambda: self.now_s)

    def told(self) -> list[Notification]:
        self.alerts.close()
        return self.kept.notifications


class Step(Record, extra="allow"):
    kind = "step"
    epoch: int = 1


class Epoch(Record, extra="allow"):
    kind = "epoch"
    step: int = 1400


def epochs(metric: str, values: Iterable[float]) -> list[Epoch]:
    return [Epoch(epoch=number, **{metric: value}) for number, value in enumerate(values, start=1)]


def steps(metric: str, values: Iterable[float]) -> list[Step]:
    return [Step(step=number, **{metric: value}) for number, value in enumerate(values, start=1)]


def asked(alerts: Alerts, record: Record) -> Act:
    """What is asked of the loop after one more record."""
    alerts.append(record)
    return alerts.action


@pytest.mark.parametrize(
    ("metric", "rule", "values", "fires_after"),
    [
        ("val_loss", "no_improvement_for: 3 epochs", [1.0, 0.9, 0.95, 0.92, 0.9, 0.91, 0.8, 0.8, 0.8, 0.8], [5, 10]),
        ("val_accuracy", "no_improvement_for: 2 epochs", [0.5, 0.6, 0.5, 0.7, 0.7, 0.6, 0.5], [6]),
        ("val_error", "no_improvement_for: 1 epochs, better: lower", [3, 2, 2, 1, 2], [3, 5]),
        ("val_loss", "no_improvement_for: 2 epochs", [nan, nan, 1.0, nan, inf], [2, 5]),
        ("val_loss", "above: 2, for: 3 epochs", [3, 3, 1, 3, 3, 3, 3], [6]),
    ],
)
def test_rules_over_epochs(metric: str, rule: str, values: list[float], fires_after: list[int]) -> None:
    bench = Bench(f"metric: {metric}, {rule}")
    bench.alerts.append(*epochs(metric, values))
    assert [notification.epoch for notification in bench.told()] == fires_after


@pytest.mark.parametrize(
    ("metric", "rule", "values", "fires_after"),
    [
        ("loss", "above: 2", [1, 2, 2.5, 3, 1, 3], [3, 6]),
        ("loss", "below: 2", [3, 2, 1, 1, nan, 1], [3, 6]),
        ("loss", "above: 2, for: 3 steps", [3, 3, 1, 3, 3, 3, 3, 1, 3, 3, 3], [6, 11]),
        ("loss", "not_finite: true", [1, nan, inf, 1, -inf], [2, 5]),
        ("samples_per_s", "fallen_by: 50 %", [*STEADY, 51, 50, 40, 90, 49], [22, 25]),
        ("samples_per_s", "fallen_by: 50 %, for: 2 steps", [*STEADY, 50, 90, 50, 50], [24]),
        ("samples_per_s", "fallen_by: 50 %", [*STEADY[1:], 1], []),  # what is usual is not known yet
        ("samples_per_s", "fallen_by: 50 %", [*STEADY, *[10] * 300, 100, 10], [21, 322]),  # low is never usual
    ],
)
def test_rules_over_steps(metric: str, rule: str, values: list[float], fires_after: list[int]) -> None:
    bench = Bench(f"metric: {metric}, {rule}")
    bench.alerts.append(*steps(metric, values))
    assert [notification.step for notification in bench.told()] == fires_after


def test_a_step_is_in_an_epoch_that_is_not_over() -> None:
    bench = Bench("metric: loss, above: 2, for: 2 epochs")
    for step in range(1, 7):
        bench.alerts.append(Step(step=step, epoch=(step + 1) // 2, loss=3.0))
    assert [notification.step for notification in bench.told()] == [5]


def test_time_passes_on_the_clock() -> None:
    bench = Bench("metric: loss, above: 2, for: 5 min")
    for now_s, loss in [(0, 1), (10, 3), (309, 3), (310, 3), (311, 1), (312, 3), (612, 3)]:
        bench.now_s = now_s
        bench.alerts.append(Step(step=now_s, loss=loss))
    assert [notification.step for notification in bench.told()] == [310, 612]


def test_silence_is_noticed_once_and_again_after_a_report() -> None:
    bench = Bench("nothing_reported_for: 10 min", do=["notify", "pause"])
    for now_s, expected in [(599, "notify"), (600, "pause"), (900, "pause")]:
        bench.now_s = now_s
        bench.alerts.check_silence()
        assert bench.alerts.action is expected
    assert asked(bench.alerts, Step(step=7, loss=1.0)) == "pause"
    bench.now_s += 600
    bench.alerts.check_silence()
    first, second = bench.told()
    assert (first.step, first.metric, first.value, first.action) == (None, None, None, "pause")
    assert second.step == 7


def test_the_thread_notices_silence() -> None:
    bench = Bench("nothing_reported_for: 10 min", do=["stop"])
    bench.now_s = 600
    wait_until(lambda: bench.alerts.action == "stop")


def test_stop_beats_pause_and_what_was_asked_for_stays() -> None:
    rules = [
        alert("metric: loss, not_finite: true", "stop"),
        alert("metric: loss, above: 2", "pause"),
        alert("metric: lr, above: 0", "notify"),
    ]
    alerts = Alerts(rules, Notifier(), "run-1", "digits")
    losses = [1.0, 3.0, 1.0, inf, 1.0]
    heard = [asked(alerts, Step(step=1, loss=loss, lr=0.1)) for loss in losses]
    assert heard == ["notify", "pause", "pause", "stop", "stop"]


def test_a_resumed_run_knows_what_came_before() -> None:
    before = epochs("val_loss", [0.5, 0.6, 0.6])
    rule = "metric: val_loss, no_improvement_for: 2 epochs"
    paused, resumed, lost = (Bench(rule, do=["notify", "pause"]) for _ in range(3))
    assert [asked(paused.alerts, record) for record in before][-1] == "pause"
    resumed.alerts.recall(before)
    assert resumed.alerts.action == "notify"
    assert asked(resumed.alerts, Epoch(epoch=4, val_loss=0.6)) == "notify"
    lost.alerts.recall(before[:2])
    assert asked(lost.alerts, before[2]) == "pause"


def test_what_is_no_number_counts_as_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("metric: val_perplexity, above: 0", "metric: val_los, above: 3", "metric: plan, not_finite: true")
    bench.alerts.append(Step(step=5, loss=1.0))
    assert "val_los" not in capsys.readouterr().err
    for epoch in (1, 2):
        bench.alerts.append(Epoch(epoch=epoch, val_perplexity=None, plan={"zero_stage": 1}))
    assert bench.told() == []
    assert capsys.readouterr().err.count("no record had plan, val_los, val_perplexity so far") == 1


def test_a_metric_within_another_is_known_by_its_path() -> None:
    bench = Bench("metric: memory.peak_bytes, above: 10")
    bench.alerts.append(*(Step(step=peak, memory={"peak_bytes": peak}) for peak in (9, 10, 11)))
    assert [(notification.step, notification.metric, notification.value) for notification in bench.told()] == [
        (11, "memory.peak_bytes", 11.0)
    ]


def test_the_log_has_a_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("metric: val_loss, above: 0.5", do=["pause"])
    bench.alerts.append(Epoch(epoch=7, step=1400, val_loss=0.52134))
    assert capsys.readouterr().out == (
        "alert: val_loss above 0.5 (val_loss 0.52134, epoch 7, step 1,400): training pauses\n"
    )
    assert bench.told() == []  # a pause without notify stays in the log
