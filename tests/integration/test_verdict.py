"""What a run says of its model, for data whose fault is planted: its last line, its result and its page."""

import html
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
Rows = list[dict[str, Any]]
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
        pytest.param(
            overfit,
            ["linear", "overfit"],
            "overfitted, because it reaches 1.000 on training rows",
            ("train.epochs=60",),
            marks=pytest.mark.slow,
        ),
        (leaking_column, ["leak"], "column 'price' alone determines the label (leak)", ()),
        (repeated_rows, ["leak"], "validation rows nearly equal training rows (leak)", ("train.epochs=2",)),
        pytest.param(noise, ["linear", "noise"], "held down by noise in the labels", (), marks=pytest.mark.slow),
        (good, [], "better than the majority class 0.", ("train.epochs=30",)),
        pytest.param(
            good_number, [], "better than the median's error", ("train.epochs=30", *NUMBERS), marks=pytest.mark.slow
        ),
    ],
)
def test_the_verdict_names_what_is_planted(
    planted: Planted, findings: list[str], words: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    require_said(train(planted, tmp_path, *keys), findings, words, tmp_path)


def require_said(printed: str, findings: list[str], words: str, folder: Path) -> None:
    """Check the last lines of the log, RESULT, the page, and ``runs show``."""
    *_, said, line = printed.splitlines()
    judgement = Judgement.model_validate(result_of(printed)["metrics"]["judgement"])
    assert judgement.findings == findings
    assert words in judgement.verdict
    assert f" {judgement.value:.3f} ± " in judgement.verdict
    assert said == f"{'warning' if judgement.is_void else 'verdict'}: {judgement.verdict}", "the log ends with it"
    assert json.loads(line.removeprefix("RESULT "))["verdict"] == judgement.verdict
    (run,) = (folder / "runs/train").iterdir()
    page = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    assert page.index(judgement.verdict) < page.index("machine") < page.index("train.optimizer.lr: 0.01")
    shown = CliRunner().invoke(app, ["runs", "show", run.name, "--storage", str(folder)])
    assert judgement.verdict in shown.stdout


def random_words(random: Generator) -> Rows:
    """Words in a random order, whose frequencies are all that can be learned."""
    words = np.array(["rain", "sun", "wind", "snow", "fog"])
    return [{"text": " ".join(random.choice(words, 60, p=[0.4, 0.3, 0.15, 0.1, 0.05]))} for _ in range(120)]


def one_letter_after_another(_: Generator) -> Rows:
    """Letters of which each is as frequent as any other, and given by the one before."""
    return [{"text": ("abcdefgh" * 40)[first : first + 200 + number]} for number, first in enumerate([*range(8)] * 20)]


def tags_by_context(random: Generator) -> Rows:
    """The same word is a city after "to", and a name after "by"."""
    rows = []
    for number in range(600):
        way, tag = ("to", "B-city") if random.random() < 0.5 else ("by", "B-name")
        rows.append({"tokens": [f"w{number}", way, "paris"], "tags": ["O", "O", tag]})
    return rows


def pairs_of_strangers(random: Generator) -> Rows:
    """Texts that have nothing in common."""
    words = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 8)) for _ in range(800)]
    return [
        {"anchor": f"where is {one}?", "positive": f"{other} is over there."}
        for one, other in itertools.pairwise(words)
    ][::2]


SMALL_GPT = ("model.args={layers: 1, width: 32, heads: 2}", "data.block_length=32", "data.tokenizer={kind: bytes}")


@pytest.mark.parametrize(
    ("recipe", "rows", "findings", "words", "keys"),
    [
        ("stdlib_gpt", one_letter_after_another, [], "better than the unigram model 8.", SMALL_GPT),
        ("python_tokens", tags_by_context, [], "better than the most frequent tag O 0.000 and the most", ()),
        ("docstrings", pairs_of_strangers, ["chance"], "not significantly better than a random order 0.0", ()),
    ],
)
def test_other_tasks_have_a_verdict_too(
    recipe: str,
    rows: Callable[[Generator], Rows],
    findings: list[str],
    words: str,
    keys: tuple[str, ...],
    tmp_path: Path,
) -> None:
    found = rows(np.random.default_rng(0))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
    given = [f"storage={tmp_path}", f"data.source={tmp_path / 'rows.jsonl'}", "data.clean.near_duplicates=null"]
    given += ["train.workers=1", "train.optimizer.lr=0.01", "train.epochs=4", "train.early_stopping=null", "tune=null"]
    done = in_fork("app.training", f"recipes/{recipe}.yaml", *given, *keys, processes=1, timeout=100)
    assert done.returncode == 0, done.stderr
    require_said(done.stdout, findings, words, tmp_path)


def test_a_model_at_chance_is_published_with_a_warning_and_not_at_all_below_a_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = train(chance, tmp_path)
    require_said(printed, ["chance"], "not significantly better than the majority class 0.", tmp_path)
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
