"""The RESULT line of a job, and the file that it names."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.compile.run import CompileMetrics
from app.config import load_recipe
from app.errors import RayloomError
from app.figures import FIGURES
from app.runs import Outcome, Result, Run, execute
from app.training.records import TrainMetrics
from app.tuning.outcome import TuneMetrics
from jobs._runner import main
from jobs.deploy import DeployMetrics
from jobs.plan import PlanMetrics
from jobs.prepare import PrepareMetrics
from jobs.undeploy import UndeployMetrics
from tests.helpers import ROOT, result_line

DIGITS = str(ROOT / "recipes/digits.yaml")
METRICS: dict[str, type[BaseModel]] = {
    "prepare": PrepareMetrics,
    "train": TrainMetrics,
    "tune": TuneMetrics,
    "compile": CompileMetrics,
    "deploy": DeployMetrics,
    "undeploy": UndeployMetrics,
    "plan": PlanMetrics,
}


class Reached(BaseModel):
    """Some of what training reports, and something that no person wants to see."""

    val_accuracy: float = 0.843412345
    val_loss: float = 1 / 3
    epochs: int = 2
    plan: dict[str, int] = {"micro_batch": 8}


def reach(run: Run) -> Outcome:
    run.open()
    return Outcome(Reached(), {"weights": "/somewhere"})


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Limits the size of files, as a quota or a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [5_000, 10])
def test_a_full_disk_ends_a_job_with_a_sentence(
    size: int, limit: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(run: Run) -> Outcome:
        run.open()
        limit(size)
        (run.folder / "large").write_bytes(bytes(100_000))
        raise AssertionError

    assert main("train", fill, [DIGITS, f"storage={tmp_path}"]) == 1
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out
    words = "a file cannot be written or read ([Errno 27] File too large"
    assert words in told.err
    line = result_line(told.out)
    assert line["status"] == "failed"
    assert words in line["error"]
    # The result is lost if there is no room for it, either, and standard error says so.
    assert ("result" in line) is (size > 10)
    assert (f"storage '{tmp_path}' cannot be written" in told.err) is (size == 10)


def test_the_line_has_the_figures_and_the_file_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", reach, [DIGITS, f"storage={tmp_path}"]) == 0
    output = capsys.readouterr().out
    line, whole = result_line(output), Result.of_output(output)
    assert list(line) == ["job", "run_id", "status", "val_accuracy", "val_loss", "epochs", "result"]
    assert (line["job"], line["status"], line["val_accuracy"], line["val_loss"]) == (
        "train",
        "succeeded",
        0.84341,
        0.33333,
    )
    assert line["result"] == str(tmp_path / "runs/train" / line["run_id"] / "result.json")
    assert json.loads(Path(line["result"]).read_bytes()) == whole.model_dump(mode="json", exclude_none=True)
    assert (whole.metrics, whole.artifacts) == (Reached().model_dump(), {"weights": "/somewhere"})


def test_the_whole_is_printed_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", reach, [DIGITS, "--json", f"storage={tmp_path}"]) == 0
    output = capsys.readouterr().out
    (file,) = tmp_path.glob("runs/train/*/result.json")
    assert result_line(output) == json.loads(file.read_bytes())
    assert Result.of_output(output) == Result.model_validate_json(file.read_bytes())


def test_a_refused_job_has_no_file_so_its_line_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", reach, [DIGITS, "train.epochs=0"]) == 2
    output = capsys.readouterr().out
    assert result_line(output).keys() >= {"job", "recipe", "status", "error", "duration_s"}
    assert "result" not in result_line(output)
    assert "train.epochs" in str(Result.of_output(output).error)


def test_a_failed_job_says_why_and_names_its_file(tmp_path: Path) -> None:
    def fail(run: Run) -> Outcome:
        run.open()
        raise RayloomError("the disk is full")

    result = execute(Run.start("train", load_recipe(DIGITS, [f"storage={tmp_path}"])), fail)
    line = result_line(result.to_line())
    assert (line["status"], line["error"]) == ("failed", "the disk is full")
    assert Result.of_output(result.to_line()).error == "the disk is full"


@pytest.mark.parametrize("output", ["", "epoch 1/2\n", 'RESULT {"job": "train"}\n', "RESULT half a line\n"])
def test_an_output_without_a_result_is_refused(output: str) -> None:
    with pytest.raises((ValueError, ValidationError)):
        Result.of_output(output)


@pytest.mark.parametrize("job", FIGURES)
def test_figures_are_few_and_are_reported(job: str) -> None:
    assert 1 <= len(FIGURES[job]) <= 6
    for kind, *path in (place.split(".") for place in FIGURES[job].values()):
        if kind == "metrics":
            metrics = METRICS[path.pop(0) if job == "lifecycle" else job]
            assert _has(metrics.model_json_schema(mode="serialization"), path), path


def _has(schema: dict[str, Any], path: list[str]) -> bool:
    node = schema
    for key in path:
        options = [node, *node.get("anyOf", [])]
        node = next(
            option
            for option in options
            if option.get("type") != "null" and ("$ref" in option or "properties" in option)
        )
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if key not in node["properties"]:
            return False
        node = node["properties"][key]
    return True
