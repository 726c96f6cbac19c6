"""A run's records in TensorBoard, read back by TensorBoard."""

import importlib.util
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from upath import UPath

from app.telemetry.mirror import Mirror
from app.telemetry.record import MemoryRecord, Record
from app.telemetry.tensorboard import TensorBoardLog, hidden


class StepRecord(Record):
    kind = "step"
    epoch: int = 1
    loss: float
    loss_scale: float | None = None
    memory: MemoryRecord | None = None
    note: str = "no number"


class EpochRecord(Record):
    kind = "epoch"
    epoch: int = 1
    loss: float


def steps(*numbers: int) -> list[StepRecord]:
    return [StepRecord(step=number, loss=number / 4) for number in numbers]


def read(folder: UPath, tmp_path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar, as (step, value)."""
    copy = tmp_path / "copy"
    (folder / "tensorboard").copy(UPath(copy))
    events = EventAccumulator(str(copy)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> UPath:
    return UPath(tmp_path / "run" if request.param == "local" else f"memory://{tmp_path}/run")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond ``size`` bytes fails, as on a full disk; also one to a log that pytest writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_numbers_become_scalars_named_by_record_and_field(folder: UPath, tmp_path: Path) -> None:
    with Mirror(folder) as mirror:
        log = TensorBoardLog(mirror, first_step=1)
        log.append(StepRecord(step=1, loss=0.5, memory=MemoryRecord(peak_bytes=1024)), EpochRecord(step=1, loss=0.25))
        log.append(StepRecord(step=2, loss=float("nan"), loss_scale=2.0))
        log.close()
    scalars = read(folder, tmp_path)
    assert str(scalars.pop("step/loss")) == "[(1, 0.5), (2, nan)]"
    assert scalars == {
        "step/loss_scale": [(2, 2.0)],
        "step/memory/peak_bytes": [(1, 1024.0)],
        "step/epoch": [(1, 1.0), (2, 1.0)],
        "epoch/loss": [(1, 0.25)],
        "epoch/epoch": [(1, 1.0)],
    }


def test_a_number_that_does_not_change_among_records_is_written_once(folder: UPath, tmp_path: Path) -> None:
    with Mirror(folder) as mirror:
        log = TensorBoardLog(mirror, first_step=1)
        log.append(*(StepRecord(step=step, loss=step / 4, loss_scale=2.0 if step < 3 else 1.0) for step in (1, 2, 3)))
        log.append(StepRecord(step=4, loss=1.0, loss_scale=1.0))
        log.close()
    assert read(folder, tmp_path) == {
        "step/loss": [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)],
        "step/loss_scale": [(2, 2.0), (3, 1.0), (4, 1.0)],
        "step/epoch": [(3, 1.0), (4, 1.0)],
    }


def test_a_resumed_run_has_no_step_twice(folder: UPath, tmp_path: Path) -> None:
    with Mirror(folder) as mirror:  # what a kill leaves of it
        killed = TensorBoardLog(mirror, first_step=1)
        killed.append(*steps(1, 2, 3, 4))
    with Mirror(folder) as mirror:
        resumed = TensorBoardLog(mirror, first_step=3)
        resumed.append(StepRecord(step=3, loss=8.0))
        resumed.close()
    assert read(folder, tmp_path) == {
        "step/loss": [(1, 0.25), (2, 0.5), (3, 8.0)],
        "step/epoch": [(3, 1.0)],
    }


def test_training_goes_on_when_storage_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    log = TensorBoardLog(Mirror(UPath(tmp_path / "file")), first_step=1)
    log.append(*steps(1, 2))
    log.close()
    assert capsys.readouterr().err.count("training goes on") == 1


def test_training_goes_on_when_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = TensorBoardLog(Mirror(UPath(tmp_path)), first_step=1)
    with files_of_at_most(20_000):
        for number in range(1, 1_000):
            log.append(*steps(number))
        log.close()
    assert capsys.readouterr().err.count("training goes on") == 1
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_size == 20_000
    assert len(EventAccumulator(str(file)).Reload().Scalars("step/loss")) > 100  # what was written can be read


def test_a_hidden_module_can_be_imported_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)  # a module of Python that nothing else imports
    with pytest.raises(ImportError, match="this"), hidden("this"):
        importlib.import_module("this")
    assert importlib.util.find_spec("this"), "an error in the block left the module hidden"
    assert "this" not in sys.modules
