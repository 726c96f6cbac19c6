"""What a run says of its model, for data whose fault is planted: its last line, its result and its page."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.random import Generator
from typer.testing import CliRunner

from app.cli.main import app
from app.compile.run import compile_model
from app.config import load_recipe
from app.runs import Run, execute
from app.telemetry.judgement import Judgement
from tests.helpers import in_fork, result_of

Planted = Callable[[Generator], pd.DataFrame]
RECIPE = "recipes/breast_cancer.yaml"
ROWS = 500


def numbers(random: Generator, columns: int, rows: int = ROWS) -> pd.DataFrame:
    return pd.DataFrame(random.normal(size=(rows, columns)), columns=[f"x{number}" for number in range(columns)])


def by_two_columns(table: pd.DataFrame) -> pd.Series:
    """A label that no line separates, and no column tells alone."""
    return pd.Series(np.where(table.x0 * table.x1 > 0, "same", "opposite"))


def chance(random: Generator) -> pd.DataFrame:
    return numbers(random, 4).assign(label=random.choice(["a", "b"], ROWS))


def overfit(random: Generator) -> pd.DataFrame:
    table = numbers(random, 60, 200)
    signal = table.x0 + table.x1 + table.x2 + table.x3 + random.normal(size=200)
    return table.assign(label=np.where(signal > 0, "a", "b"))


def leaking_column(random: Generator) -> pd.DataFrame:
    label = random.choice(["sold", "kept"], ROWS)
    return numbers(random, 3).assign(price=np.where(label == "sold", random.uniform(1, 9, ROWS), 0.0), label=label)


def repeated_rows(random: Generator) -> pd.DataFrame:
    """Each row comes three times, under another number, so equal rows are not dropped."""
    table = pd.concat([chance(random)] * 3, ignore_index=True)
    return table.assign(number=random.permutation(len(table)))


def noise(random: Generator) -> pd.DataFrame:
    table = numbers(random, 2, 2000)
    label = np.where(table.x0 + table.x1 > 0, "a", "b")
    return table.assign(label=np.where(random.random(2000) < 0.25, random.permutation(label), label))


def good(random: Generator) -> pd.DataFrame:
    table = numbers(random, 2, 1500)
    return table.assign(label=by_two_columns(table))


def good_number(random: Generator) -> pd.DataFrame:
    table = numbers(random, 2, 1000)
    return table.assign(label=20 + 5 * table.x0 * table.x1 + 0.5 * random.normal(size=1000))


NUMBERS = ("task=tabular-regression", "train.early_stopping=null", "tune=null")


def train(planted: Planted, folder: Path, *keys: str) -> str:
    """Train on planted rows, and return what the log says."""
    planted(np.random.default_rng(0)).to_csv(folder / "rows.csv", index=False)
    done = in_fork("app.training", RECIPE, *keys_in(folder), *keys, processes=1, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def keys_in(folder: Path) -> list[str]:
    data = [f"storage={folder}", f"data.source={folder / 'rows.csv'}", "data.columns.label=label"]
    return [*data, "train.optimizer.lr=0.01"]


@pytest.mark.parametrize(
    ("planted", "findings", "words", "keys"),
    [
        (chance, ["chance"], "not significantly better than the majority class 0.", ()),
        (overfit, ["linear", "overfit"], "overfitted, because it reaches 1.000 on training rows", ("train.epochs=60",)),
        (leaking_column, ["leak"], "column 'price' alone determines the label (leak)", ()),
        (repeated_rows, ["leak"], "validation rows nearly equal training rows (leak)", ("train.epochs=2",)),
        (noise, ["linear", "noise"], "held down by noise in the labels", ()),
        (good, [], "better than the majority class 0.", ("train.epochs=30",)),
        (good_number, [], "better than the median's error", ("train.epochs=30", *NUMBERS)),
    ],
)
def test_the_verdict_names_what_is_planted(
    planted: Planted, findings: list[str], words: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    printed = train(planted, tmp_path, *keys)
    *_, said, line = printed.splitlines()
    judgement = Judgement.model_validate(result_of(printed)["metrics"]["judgement"])
    assert judgement.findings == findings
    assert words in judgement.verdict
    assert f" {judgement.value:.3f} ± " in judgement.verdict
    assert said == f"{'warning' if judgement.is_void else 'verdict'}: {judgement.verdict}", "the log ends with it"
    assert json.loads(line.removeprefix("RESULT "))["verdict"] == judgement.verdict
    (run,) = (tmp_path / "runs/train").iterdir()
    page = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    assert page.index(judgement.verdict) < page.index("machine") < page.index("train.optimizer.lr: 0.01")
    shown = CliRunner().invoke(app, ["runs", "show", run.name, "--storage", str(tmp_path)])
    assert judgement.verdict in shown.stdout


def test_a_model_at_chance_is_published_with_a_warning_and_not_at_all_below_a_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(chance, tmp_path)
    few = ["compile.precisions=[fp32]", "compile.engines=[onnxruntime]", "compile.batch_sizes=[1]"]
    for gate, words in (
        (
            "min_score=0.9",
            r"compile\.gates\.min_score is 0\.9, and the version has accuracy: 0\.\d+ on the \d+ rows of the",
        ),
        (
            "above_baseline=true",
            r"compile\.gates\.above_baseline is true: .* not significantly better than the majority class 0\.\d+",
        ),
    ):
        refused = execute(started("compile", tmp_path, *few, f"compile.gates.{gate}"), compile_model)
        assert refused.status == "failed"
        assert re.search(words, refused.error or "")
    assert not (tmp_path / "models").exists()
    capsys.readouterr()
    published = execute(started("compile", tmp_path, *few, "compile.gates.min_score=0.3"), compile_model)
    assert published.status == "succeeded", published.error
    assert re.search(
        r"warning: breast_cancer, version 1, is in production with .* not significantly better than",
        capsys.readouterr().out,
    )
    page = (tmp_path / "runs/compile" / published.run_id / "report.html").read_text(encoding="utf-8")
    assert "not significantly better than the majority class" in page


def started(job: str, storage: Path, *keys: str) -> Run:
    return Run.start(job, load_recipe(RECIPE, [*keys_in(storage), *keys]))
