"""What a run records of its steps, and what it hears, also where its storage fails for a while."""

import json
import math
import resource
import threading
import uuid
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from upath import UPath
from upath.implementations.memory import MemoryPath

from app.config import AlertConfig, TrainConfig
from app.config.metrics import Selection
from app.storage import to_path
from app.telemetry.alerts import Alerts, Notifier
from app.telemetry.mirror import Mirror
from app.telemetry.tensorboard import TensorBoardLog
from app.training import stop_request
from app.training.checkpoints.state import Position
from app.training.coordination.sync import LocalStep, StepSync, SyncedSteps
from app.training.engine import StepResult
from app.training.engine.deepspeed_engine import Factors
from app.training.records import EpochRecord
from app.training.reporting.recorder import Recorder
from app.training.reporting.sinks import METRICS_FILE, MetricsLog, Progress
from app.training.stop_request import CONTROL_FILE, StopRequest, StopSignals, read_stop_request, request_stop
from app.training.worker import Worker
from tests.helpers import records_of, wait_until

STEPS = 10
"""Steps of a sync."""


class Alone(Worker):
    """The only worker of a run."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values


def report(record: EpochRecord) -> None:
    """Nobody else is told."""


def synced(step_s: float) -> SyncedSteps:
    """Steps of ``step_s`` seconds."""
    result = StepResult(torch.tensor(1.0), Factors(lr=0.1, loss_scale=None), grad_norm=1.0, is_applied=True)
    steps = [LocalStep(0, result, busy_s=0.0, data_s=0.0, seconds=step_s, mfu=None, samples=64) for _ in range(STEPS)]
    return SyncedSteps(steps, [1.0] * STEPS, StopRequest.NONE, has_lost_state=False, busy_s=[0.0])


def test_a_run_that_becomes_slow_is_noticed_with_its_first_slow_steps() -> None:
    rule = AlertConfig(metric="samples_per_s", fallen_by="50 %", do=["pause"])
    alerts = Alerts([rule], Notifier(), "run-1", "digits")
    recorder = Recorder(torch.device("cpu"), None, report, lambda *_: [alerts], started=0.0)
    recorder.open(Position(), [])
    recorder.begin_epoch()
    for number, step_s in enumerate([0.1] * 50 + [0.3], start=1):
        assert alerts.action == "notify"
        recorder.record_steps(Position(step=number * STEPS), synced(step_s))
    assert alerts.action == "pause"


def test_a_run_that_was_paused_on_an_epochs_last_batch_still_knows_its_rate() -> None:
    def begin(position: Position) -> Recorder:
        recorder = Recorder(torch.device("cpu"), None, report, lambda *_: [], 0.0, clock=lambda: now)
        recorder.open(position, [])
        recorder.begin_epoch()
        return recorder

    now, position = 100.0, Position()
    recorder = begin(position)
    now = 104.0
    recorder.record_steps(position, synced(0.4))
    paused = Position.model_validate_json(position.model_dump_json())
    now = 5000.0  # more than an hour later, in another process, with no batch left
    validated = {"val_loss": 0.5, "val_accuracy": 0.5}
    assert begin(paused).make_epoch(paused, validated).samples_per_s == STEPS * 64 / 4.0


def test_an_epoch_without_a_step_has_no_training_loss() -> None:
    recorder = Recorder(torch.device("cpu"), None, report, lambda *_: [], started=0.0)
    assert math.isnan(recorder.make_epoch(Position(), {"val_loss": 0.5}).train_loss)


def record(step: int) -> EpochRecord:
    return EpochRecord(epoch=step, step=step, train_loss=1.0, val_loss=1.0, val_accuracy=0.5, samples_per_s=1.0)


def test_what_storage_refuses_is_written_with_the_next_and_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = MetricsLog(Mirror(UPath(tmp_path))), tmp_path / "metrics.jsonl"
    log.append(record(1))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size * 3 // 2, hard_limit))  # as a full disk tears a line
    try:
        log.append(record(2))
        log.append(record(3), record(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    assert not file.read_bytes().endswith(b"\n")
    log.append(record(5))
    assert [record["step"] for record in records_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("metrics.jsonl' cannot be written") == 1


def test_slow_storage_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_answered = threading.Event(), threading.Event()

    def read_slowly(_: UPath) -> StopRequest:
        if not has_begun.is_set():
            has_begun.set()
            return StopRequest.NONE
        is_answered.wait(timeout=10)
        return StopRequest.STOP

    monkeypatch.setattr(stop_request, "_POLL_S", 0.0)
    monkeypatch.setattr(stop_request, "read_stop_request", read_slowly)
    own = StopSignals(UPath(tmp_path))
    with own.poll_file():
        assert own.strongest() is StopRequest.NONE  # while the second read waits
        own.request(StopRequest.PAUSE)
        assert own.strongest() is StopRequest.PAUSE
        is_answered.set()
        wait_until(lambda: own.strongest() is StopRequest.STOP)


def test_a_request_that_cannot_be_read_is_heard_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads: list[UPath] = []

    def read_counted(folder: UPath) -> StopRequest:
        reads.append(folder)
        return read_stop_request(folder)

    monkeypatch.setattr(stop_request, "_POLL_S", 0.01)
    monkeypatch.setattr(stop_request, "read_stop_request", read_counted)
    (tmp_path / CONTROL_FILE).mkdir()
    own = StopSignals(UPath(tmp_path))
    with own.poll_file():
        wait_until(lambda: len(reads) > 2)
        assert own.strongest() is StopRequest.NONE
        (tmp_path / CONTROL_FILE).rmdir()
        request_stop(UPath(tmp_path), StopRequest.PAUSE)
        wait_until(lambda: own.strongest() is StopRequest.PAUSE)
    assert capsys.readouterr().err.count("cannot be read") == 1


def test_the_platform_is_asked_once_a_second_however_often_workers_sync() -> None:
    now, asked = 0.0, list[float]()

    def poll_stop_request() -> StopRequest:
        asked.append(now)
        return StopRequest.STOP if now >= 2.5 else StopRequest.NONE

    sync = StepSync(
        Alone(0, 1, torch.device("cpu")), [lambda: StopRequest.NONE], lambda: False, poll_stop_request, lambda: now
    )
    while sync.run().stop_request is StopRequest.NONE:
        now += 0.125
    assert now <= 3.75
    assert len(asked) <= 4


def test_only_one_worker_reads_what_is_asked_of_the_run(tmp_path: Path) -> None:
    request_stop(UPath(tmp_path), StopRequest.PAUSE)
    first, other = StopSignals(UPath(tmp_path)), StopSignals(UPath(tmp_path))
    with first.poll_file():
        assert (first.strongest(), other.strongest()) == (StopRequest.PAUSE, StopRequest.NONE)
    other.request(StopRequest.STOP)
    assert other.strongest() is StopRequest.STOP


def logged(folder: UPath) -> list[int]:
    """Return the steps in the stored metrics file."""
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_run_that_goes_on_elsewhere_neither_loses_nor_repeats_a_line(storage: str) -> None:
    folder = to_path(storage) / "run-1"
    killed = Mirror(folder)
    log = MetricsLog(killed)
    for step in (1, 2, 3):
        log.append(record(step))
    killed.flush()  # before the checkpoint of step 3 is there
    log.append(record(4))
    killed.flush()
    with Mirror(folder) as elsewhere:
        log = MetricsLog(elsewhere)
        log.restore(3, [record(1), record(2), record(3)])
        log.append(record(4), record(5))
    assert logged(folder) == [1, 2, 3, 4, 5]


def test_an_epoch_whose_line_was_lost_gets_it_back(tmp_path: Path) -> None:
    """The process was killed after it committed the checkpoint and before it wrote the line."""
    log = MetricsLog(Mirror(UPath(tmp_path)))
    log.append(record(1), record(3))
    log.restore(2, [record(1), record(2)])
    log.append(record(3))
    assert logged(UPath(tmp_path)) == [1, 2, 3]


def test_storage_that_is_slow_holds_up_neither_steps_nor_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, writers, slow = UPath(f"memory://{uuid.uuid4().hex}/run-1"), set[str](), threading.Event()
    write = MemoryPath.write_bytes

    def slowly(path: MemoryPath, data: bytes) -> int:
        writers.add(threading.current_thread().name)
        slow.wait()
        return int(write(path, data))

    monkeypatch.setattr(MemoryPath, "write_bytes", slowly)
    with Mirror(folder, interval_s=0.01) as mirror:
        log, tensorboard = MetricsLog(mirror), TensorBoardLog(mirror, first_step=1)
        wait_until(lambda: bool(writers))
        for step in (1, 2, 3):
            log.append(record(step))
            tensorboard.append(record(step))
        assert writers == {"mirror"}
        slow.set()
    assert logged(folder) == [1, 2, 3]


def test_a_file_that_is_being_fetched_is_not_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = UPath(f"memory://{uuid.uuid4().hex}/run-1"), Path.write_bytes
    (folder / METRICS_FILE).write_bytes(b"whole\n")
    with Mirror(folder) as mirror:
        copying = threading.Thread(target=mirror.flush)

        def write_slowly(path: Path, data: bytes) -> int:
            write(path, data[:2])
            copying.start()
            copying.join(timeout=0.2)  # without the lock it would finish
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_slowly)
        mirror.fetch(METRICS_FILE)
        copying.join()
        assert (folder / METRICS_FILE).read_bytes() == b"whole\n"


def test_what_an_object_store_refuses_is_copied_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = UPath(f"memory://{uuid.uuid4().hex}/run-1")
    with Mirror(folder) as mirror:
        log = MetricsLog(mirror)
        log.append(record(1))
        with monkeypatch.context() as refusing:
            refusing.setattr(MemoryPath, "write_bytes", Mock(side_effect=OSError("no room")))
            mirror.flush()
            log.append(record(2))
            mirror.flush()
        assert capsys.readouterr().err.count("cannot be written and will be retried (OSError: no room)") == 1
        mirror.flush()
        assert logged(folder) == [1, 2]


@pytest.mark.parametrize(("epochs", "lines"), [(3, 3), (50, 50), (4_000, 50)])
def test_quick_epochs_do_not_fill_the_log(capsys: pytest.CaptureFixture[str], epochs: int, lines: int) -> None:
    progress = Progress(TrainConfig(epochs=epochs), Selection("val_loss", "min"), epochs, 0, [])
    for number in range(1, epochs + 1):
        progress.append(record(number))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == lines
    assert said[-1].startswith(f"epoch {epochs}/{epochs}  loss 1.0000")
