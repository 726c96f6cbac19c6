"""Targets with the figures of runs, searches and models."""

import json
from pathlib import Path

import pytest
from upath import UPath

from app.config import dump_recipe, load_recipe
from app.monitoring.check import Finding, findings
from app.reports.training import training_page
from app.runs import Result
from tests.helpers import ROOT, run
from tests.proxies import listening
from tests.wording import refused

RUN, SEARCH = "20260101-000000-digits-aaaa", "20260101-000001-digits-bbbb"
PROFILE = {
    "worker": 0, "steps": 3, "step_ms": 10.0, "compute": 0.7, "communication": 0.02, "data": 0.05, "optimizer": 0.2,
    "other": 0.03, "hidden_communication": 0.0,
}  # fmt: skip


@pytest.fixture
def storage(tmp_path: Path) -> UPath:
    """With a run, which has a profile, a search of 70 epochs, and a model."""
    recipe = dump_recipe(load_recipe(str(ROOT / "recipes/digits.yaml"), ["train.epochs=10"]))
    for job, name in (("train", RUN), ("tune", SEARCH)):
        (tmp_path / "runs" / job / name).mkdir(parents=True)
        (tmp_path / "runs" / job / name / "config.yaml").write_text(recipe, encoding="utf-8")
    steps = [{"step": step, "data_stall": stall, "memory": {"peak_bytes": 1}} for step, stall in ((1, 0.01), (2, 0.05))]
    epoch = {"step": 2, "epoch": 1, "val_loss": 0.5}
    training = tmp_path / "runs/train" / RUN
    (training / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*steps, epoch])), encoding="utf-8")
    (training / "profile").mkdir()
    (training / "profile/summary.json").write_text(json.dumps(PROFILE), encoding="utf-8")
    ended = Result(
        job="tune", run_id=SEARCH, recipe="digits", status="succeeded", metrics={"epochs_trained": 70}, duration_s=1.0
    )
    (tmp_path / "runs/tune" / SEARCH / "result.json").write_text(ended.model_dump_json(), encoding="utf-8")
    (tmp_path / "models/digits").mkdir(parents=True)
    return UPath(tmp_path)


def ask(expression: str) -> float | None:
    """Answer as Prometheus would: a first answer in 40 ms, a target of 20 ms, a p99 of 30 ms."""
    known = {"first_answer": 0.04, "latency_target": 0.02, "histogram_quantile(0.99": 0.03}
    return next(value for name, value in known.items() if name in expression)


def test_a_data_stall_is_explained(storage: UPath) -> None:
    metrics = storage / "runs/train" / RUN / "metrics.jsonl"
    reading = {"processes": 0, "seconds": 0.1, "cpu_s": 0.01, "queued_s": 0.02, "source": "network"}
    entries = [json.loads(line) | {"reading": reading} for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    stall = next(found for found in findings(storage, None, ask) if found.target.name == "data stall")
    assert stall.source == (
        "mean of 2 steps, bound by the network, read by the training process: set train.loader.num_workers=auto"
    )
    page = training_page(storage / "runs/train" / RUN).to_html()
    assert "Data is no bottleneck: 3.0 % of a step." in page


def test_a_line_that_is_being_written_is_left_out(storage: UPath) -> None:
    metrics = storage / "runs/train" / RUN / "metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8") + '\n{"step": 3, "data_st', encoding="utf-8")
    stall = next(found for found in findings(storage, None, ask) if found.target.name == "data stall")
    assert stall.source == "mean of 2 steps"


def table(found: list[Finding]) -> dict[tuple[str, str], tuple[float | None, bool | None]]:
    return {(item.subject, item.target.name): (item.value, item.passes) for item in found}


def test_every_target_has_its_figure(storage: UPath) -> None:
    assert table(findings(storage, None, ask)) == {
        (RUN, "device use"): (pytest.approx(0.9), True),
        (RUN, "communication"): (0.02, True),
        (RUN, "memory fragmentation"): (None, None),
        (RUN, "data stall"): (pytest.approx(0.03), False),
        (SEARCH, "device time of the search"): (7.0, False),
        ("digits", "first answer"): (0.04, True),
        ("digits", "p99"): (0.03, False),
    }


def test_the_p99_of_a_language_model_is_that_of_its_first_token(storage: UPath) -> None:
    def ask_about_language(expression: str) -> float | None:
        """Answer as a Prometheus without ``request_seconds``."""
        known = {"latency_target": 0.02, "or histogram_quantile(0.99, sum by (le) (rate(ray_rayloom_generation_": 0.03}
        return next((value for name, value in known.items() if name in expression), None)

    assert table(findings(storage, "digits", ask_about_language))["digits", "p99"] == (0.03, False)


def test_one_subject_is_checked_alone(storage: UPath) -> None:
    assert {finding.subject for finding in findings(storage, SEARCH, ask)} == {SEARCH}
    (storage / "runs/train" / RUN / "profile/summary.json").unlink()
    assert table(findings(storage, RUN, ask))[RUN, "device use"] == (None, None)
    with refused("run.unknown"):
        findings(storage, "other", ask)


def test_the_command_tells_what_fails_and_what_nobody_measured(storage: UPath) -> None:
    done = run("rayloom", "check", f"--storage={storage}", environment={"RAYLOOM_HOME": str(storage / "home")})
    assert done.returncode == 1, done.stderr
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert f"FAIL {SEARCH}" in done.stdout
    assert "3.0 %  < 2.0 %" in done.stdout
    assert any("first answer" in line and "not measured" in line for line in done.stdout.splitlines()), lines


@pytest.mark.parametrize("spared", ["", "example.org"])
def test_no_proxy_is_asked_for_this_machine(storage: UPath, spared: str) -> None:
    with listening(404) as prometheus, listening(403) as proxy:
        given = {"HTTP_PROXY": proxy.url, "http_proxy": proxy.url, "NO_PROXY": spared, "no_proxy": ""}
        run("rayloom", "check", "--storage", str(storage), "--prometheus", prometheus.url, environment=given)
        assert prometheus.lines
        assert not proxy.lines
