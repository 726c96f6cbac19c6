"""Judgements of honest data and of models that learned nothing: no fault is found where there is none."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from sklearn.datasets import load_iris

from app.config import load_recipe
from app.data.labelled import LabelledDataset, Split
from app.data.processor import Processor
from app.data.shard_cache import ShardCache
from app.data.targets import Classes, LabelSets, Targets
from app.tasks import ServedTask, find_task, prepare
from app.tasks.judgement import Predictions
from app.tasks.judgement.examples import ExampleJudge
from app.telemetry.judgement import Baseline, Judgement
from tests.helpers import ROOT

KEYS = ["train.linear_baseline=false", "tune=null"]


class Given(Processor):
    """A processor of a modality that is never asked to encode."""

    def __init__(self, modality: Any) -> None:
        self.modality = modality


def judge_of(task: str, learned: LabelledDataset) -> ExampleJudge:
    recipe, found = load_recipe(str(ROOT / "recipes/breast_cancer.yaml"), KEYS), find_task(task)
    assert isinstance(found, ServedTask)
    judge = ExampleJudge.of(recipe, found, learned)
    assert judge
    return judge


def dataset_of(targets: Targets, values: Sequence[Any], texts: Sequence[str] = ()) -> LabelledDataset:
    """Return texts with their values, or pictures that cannot be read."""
    split = Split(list(texts) or [b""] * len(values), list(values))
    return LabelledDataset(split, Given("text" if texts else "image"), targets)  # type: ignore[abstract]


def judged(outputs: NDArray[Any], values: Sequence[int], texts: Sequence[str] = ()) -> Judgement:
    """Judge a classifier's outputs for the last rows. It learned from those before them, or from the same ones."""
    classes, held = Classes(["no", "yes"]), len(outputs)
    rows = dataset_of(classes, values[-held:], texts[-held:])
    learned = dataset_of(classes, values[:-held], texts[:-held]) if held < len(values) else rows
    judge = judge_of("text-classification" if texts else "image-classification", learned)
    made = Predictions(torch.from_numpy(outputs.astype(np.float32)), torch.tensor(values[-held:]))
    return judge.judge("validation", rows, judge.metric.of(made.outputs, made.targets), [made])


def iris(random: Generator) -> pd.DataFrame:
    table = load_iris(as_frame=True).frame
    return table.rename(columns={"target": "label"}).sample(frac=1.0, random_state=int(random.integers(99)))


def passengers(random: Generator, rows: int = 900) -> pd.DataFrame:
    """Independent rows of coarse columns, as of the Titanic."""
    table = pd.DataFrame(
        {
            "class": random.choice([1, 2, 3], rows, p=[0.24, 0.21, 0.55]),
            "sex": random.choice(["male", "female"], rows, p=[0.65, 0.35]),
            "age": random.normal(30, 14, rows).clip(1, 80).round(),
            "siblings": random.poisson(0.5, rows),
            "parents": random.poisson(0.4, rows),
            "port": random.choice(["S", "C", "Q"], rows, p=[0.72, 0.19, 0.09]),
        }
    )
    return table.assign(label=np.where(random.random(rows) < np.where(table.sex == "female", 0.74, 0.19), "yes", "no"))


@pytest.mark.parametrize("made", [iris, passengers])
def test_independent_rows_are_no_leak(made: Any, tmp_path: Path) -> None:
    for seed in range(8):
        made(np.random.default_rng(seed)).to_csv(tmp_path / "rows.csv", index=False)
        keys = [f"data.source={tmp_path / 'rows.csv'}", "data.columns.label=label", f"data.seed={seed}"]
        recipe = load_recipe(str(ROOT / "recipes/breast_cancer.yaml"), [*KEYS, f"storage={tmp_path}", *keys])
        data: Any = prepare(recipe)
        judge = ExampleJudge.of(recipe, find_task(recipe.task), data.train)  # type: ignore[arg-type]
        assert judge
        targets = torch.tensor(list(data.validation.split.classes))
        outputs = torch.nn.functional.one_hot(targets, data.targets.num_outputs).float()
        found = judge.judge("validation", data.validation, 1.0, [Predictions(outputs, targets)])
        assert found.leaks == [], seed


def test_a_constant_model_is_never_better_than_the_majority_class() -> None:
    outputs = np.tile([1.0, 0.0], (10_000, 1))
    for seed in range(20):
        values = (np.random.default_rng(seed).random(10_000) < 0.1).astype(int).tolist()
        found = judged(outputs, values)
        assert found.trivial
        assert found.trivial.value == pytest.approx(found.value)
        assert found.findings == ["chance"]


@pytest.mark.parametrize("shares", [[0.8, 0.2], [0.88, 0.88]])
def test_labels_that_depend_on_chance_in_groups_are_not_called_noise(shares: list[float]) -> None:
    random = np.random.default_rng(0)
    share = np.array(shares)[random.integers(2, size=4000)]
    values = (random.random(4000) < share).astype(int).tolist()
    found = judged(np.log(np.stack([1.0 - share, share], 1)), values)
    assert found.noise == 0.0


def test_texts_without_letters_are_compared_as_they_are() -> None:
    texts = [chr(0x1F300 + number) if number % 5 == 0 else f"text {number}" for number in range(400)]
    assert judged(np.eye(2)[[0, 1] * 100], [0, 1] * 200, texts).leaks == []


def test_families_of_a_few_rows_are_not_multiplied_by_the_rows_that_were_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.tasks.judgement.rows._MAX_ROWS", {"text": 4000})
    random = np.random.default_rng(0)
    keys = np.arange(10_000).astype(str).astype(object)
    # 8 % of the rows are in families of 50.
    chosen = random.choice(10_000, 800, replace=False)
    keys[chosen] = [f"family {number % 16}" for number in range(800)]
    texts = [f"{key}{'.' * int(dots)}" for key, dots in zip(keys, random.integers(9, size=10_000), strict=True)]
    assert judged(np.eye(2)[[0, 1] * 1000], [0, 1] * 5000, texts).leaks == []


def test_the_constant_baseline_of_sets_has_as_many_labels_as_score_best() -> None:
    random = np.random.default_rng(0)
    targets = LabelSets(list("abcde"))
    values = [np.flatnonzero(random.random(5) < 0.4).tolist() for _ in range(1000)]
    texts = [str(number) for number in range(2000)]
    rows = dataset_of(targets, values, texts[1000:])
    judge = judge_of("text-multilabel", dataset_of(targets, values, texts[:1000]))
    made = Predictions(-torch.ones(1000, 5), torch.from_numpy(targets.batch(values)))
    found = judge.judge("validation", rows, 0.0, [made])
    assert found.trivial
    assert found.trivial.name == "the 5 most frequent labels"
    assert found.trivial.value == pytest.approx(0.57, abs=0.02)
    # The score of a few rows tells nothing, even if all are right.
    right = Predictions(made.targets[:5] * 2.0 - 1.0, made.targets[:5])
    few = judge.judge("validation", dataset_of(targets, values[:5], texts[-5:]), 1.0, [right])
    assert few.findings == []
    assert not few.is_above_baselines
    assert "on too few rows to compare it with the" in few.verdict
    assert math.isnan(Judgement.model_validate_json(few.model_dump_json()).low)
    # Of many rows that are all right, some others may be wrong.
    right = Predictions(made.targets * 2.0 - 1.0, made.targets)
    sure = judge.judge("validation", rows, 1.0, [right])
    assert sure.low == pytest.approx(1.0 - 3.0 / 1000)
    assert sure.is_above_baselines


def test_a_score_above_the_linear_baseline_alone_says_what_the_gate_lacks() -> None:
    linear = Baseline(name="the linear baseline", value=0.5)
    known = {"metric": "accuracy", "mode": "max", "split": "test", "rows": 99, "value": 0.9, "low": 0.8, "high": 0.95}
    found = Judgement(**known, linear=linear)
    assert found.verdict == "accuracy 0.900 ± 0.100, better than the linear baseline 0.500"
    assert found.shortfall == f"{found.verdict}, but no constant baseline is known, which this gate needs"
    beaten = Judgement(**known, linear=linear.model_copy(update={"value": 0.85}))
    assert beaten.shortfall == beaten.verdict
    assert beaten.verdict.endswith("the linear baseline 0.850: use more data or another model")
    perfect = beaten.model_copy(update={"value": 1.0, "high": 1.0, "linear": linear.model_copy(update={"value": 1.0})})
    assert perfect.verdict.endswith("the linear baseline 1.000: no model can do better on these rows")
    assert Judgement(**known).shortfall.endswith("and no baseline is known")
    assert Judgement(**known, linear=linear, trivial=Baseline(name="the majority class", value=0.4)).shortfall == ""


def test_a_judgement_opens_few_shards_of_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"text number {number} {'again ' * 20},{number % 2}" for number in range(4000)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    keys = [f"data.source={tmp_path / 'rows.csv'}", f"storage={tmp_path}", "data.shards={size: 8KB, window: 16KB}"]
    recipe = load_recipe(str(ROOT / "recipes/reviews.yaml"), [*KEYS, *keys])
    data: Any = prepare(recipe)
    assert len(data.train.shards.shard_rows) > 40
    judge = ExampleJudge.of(recipe, find_task(recipe.task), data.train)  # type: ignore[arg-type]
    assert judge
    opened: set[tuple[int, int]] = set()
    open_shard = ShardCache.open

    def count(cache: ShardCache, number: int) -> Any:
        opened.add((id(cache), number))
        return open_shard(cache, number)

    monkeypatch.setattr(ShardCache, "open", count)
    made = Predictions(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64))
    found = judge.judge("validation", data.validation, 0.5, [made])
    assert len(opened) <= 32
    # All rows are counted, by the index.
    learned, held = (split.split.class_counts(2) for split in (data.train, data.validation))
    assert found.trivial
    assert found.trivial.value == pytest.approx(held[learned.argmax()] / held.sum())


def test_a_model_that_is_better_on_new_rows_is_not_overfitted() -> None:
    found = Judgement(
        metric="mae",
        mode="min",
        split="validation",
        rows=1000,
        value=0.7,
        low=0.65,
        high=0.75,
        trivial=Baseline(name="the mean's error", value=1.0),
        trained=1.2,
    )
    assert found.findings == []
    assert found.model_copy(update={"trained": 0.1}).findings == ["overfit"]
