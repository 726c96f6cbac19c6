"""A curriculum: easy samples come first, and each once an epoch."""

from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from app.config import CurriculumConfig, Recipe, load_recipe
from app.runs import Run
from app.tasks import prepare
from app.training.data.order import SampleOrder
from app.training.data.rules import Curriculum
from app.training.difficulty import recorded_difficulty, require_difficulty
from app.training.run import prepare_run
from app.training.session import train
from app.training.worker import start_worker
from tests.helpers import ROOT
from tests.orders import batches_of, in_memory
from tests.wording import refused

SAMPLES, BATCH = 1003, 20
SHARDS = "data.shards={size: 4096, window: 12KB}"
SOURCES = "data.sources=[{source: FOLDER/texts.csv}, {source: FOLDER/more.csv}]"
DIFFICULTY = np.random.default_rng(0).permutation(SAMPLES).astype(np.float32)
LENGTHS = np.random.default_rng(1).integers(1, 100, SAMPLES)


def order_with(**keys: object) -> SampleOrder:
    curriculum = Curriculum(DIFFICULTY, CurriculumConfig.model_validate(keys))
    return in_memory(LENGTHS, BATCH, seed=3, curriculum=curriculum)


def write_texts(folder: Path, rows: int = 200, cell: str = "") -> str:
    lines = [f"{'w ' * (n % 9 + 1)}{n},{'ab'[n % 2]},{cell or 1000 - n}" for n in range(rows)]
    (folder / "texts.csv").write_text("\n".join(["text,label,hard", *lines]), encoding="utf-8")
    return f"data.source={folder / 'texts.csv'}"


def recipe_of(folder: Path, curriculum: str, *overrides: str) -> Recipe:
    keys = ["data.test_fraction=null", "train.workers=1", "train.linear_baseline=false", "train.epochs=2", "alerts=[]"]
    model = ["model.args={layers: 1, width: 16, heads: 2}", f"storage={folder / 'storage'}", "tune=null"]
    given = [f"train.curriculum={curriculum}", "train.global_batch_size=16", *overrides]
    return load_recipe(ROOT / "recipes/reviews.yaml", [write_texts(folder), *keys, *model, *given])


def test_competence_by_hand() -> None:
    linear = CurriculumConfig(start=0.2, epochs=2.0, schedule="linear")
    assert [linear.competence(done) for done in (0, 1, 2, 3)] == pytest.approx([0.2, 0.6, 1.0, 1.0])
    root = CurriculumConfig(start=0.2, epochs=2.0)
    assert [root.competence(done) for done in (0, 1, 2)] == pytest.approx([0.2, 0.52**0.5, 1.0])


def test_no_sample_comes_before_its_time() -> None:
    order = order_with(start=0.1, epochs=0.8, schedule="linear")
    batches = batches_of(order, 1)
    # By how many of the epoch's samples are easier.
    ranks = np.searchsorted(np.sort(DIFFICULTY[np.concatenate(batches)]), DIFFICULTY)
    hardest, read = [ranks[batch].max() for batch in batches], len(batches) * BATCH
    competence = CurriculumConfig(start=0.1, epochs=0.8, schedule="linear").competence
    # Competence is that of the first of eight batches that are drawn together.
    limits = [competence(number // 8 * 8 * BATCH / read) * read for number in range(len(hardest))]
    needed = [(number // 8 + 1) * 8 * BATCH for number in range(len(hardest))]
    assert all(hard < max(*pair) for hard, *pair in zip(hardest, limits, needed, strict=True))
    assert hardest[0] < 0.2 * SAMPLES < 0.9 * SAMPLES < hardest[-1]
    assert np.array_equal(order.batch(2, 5), in_memory(LENGTHS, BATCH, seed=3).batch(2, 5))  # the curriculum is over


def _without_source(keys: list[str]) -> list[str]:
    return ["data.source=null"] if any("sources" in key for key in keys) else []


@pytest.mark.parametrize("keys", [[], [SHARDS], [SOURCES], [SHARDS, SOURCES]])
def test_a_column_is_found_by_the_text_of_each_sample(tmp_path: Path, keys: list[str]) -> None:
    # Cleaning keeps the first of the equal texts, whose number counts.
    more = [f"- more {n},a,{1000 - n}" for n in range(40)] + [f"- more {n},a,0" for n in range(40)]
    (tmp_path / "more.csv").write_text("\n".join(["text,label,hard", *more]), encoding="utf-8")
    keys = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    recipe = recipe_of(tmp_path, "{by: column, column: hard}", *keys, *_without_source(keys))
    data = prepare(recipe)
    found = recorded_difficulty(recipe, data, UPath(tmp_path / "run"))
    assert found.tolist() == [1000 - int(text.split()[-1]) for text in data.train.split.inputs]  # type: ignore[attr-defined]
    (tmp_path / "texts.csv").unlink()
    assert np.array_equal(recorded_difficulty(recipe, data, UPath(tmp_path / "run")), found)


REGRESSION = [
    "task=text-regression", "train.label_smoothing=0", "train.early_stopping=null", "data.columns.label=size",
]  # fmt: skip


@pytest.mark.parametrize("keys", [REGRESSION, ["data.clean.deduplicate=false"]])
def test_equal_texts_that_are_both_read_need_one_number(tmp_path: Path, keys: list[str]) -> None:
    hard = recipe_of(tmp_path, "{by: column, column: hard}", *keys)
    lines = [f"text {n // 4},{n % 3},{'ab'[n // 4 % 2]},{n}" for n in range(160)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,size,label,hard", *lines]), encoding="utf-8")
    with refused("curriculum.two_numbers", "train.curriculum.column"):
        require_difficulty(hard, prepare(hard), UPath(tmp_path / "run"))


@pytest.mark.parametrize("keys", [[], [SHARDS], [SHARDS, "data.sampling=balanced"]])
def test_a_run_records_what_is_hard_and_trains_on_it(tmp_path: Path, keys: list[str]) -> None:
    recipe = recipe_of(tmp_path, "{by: length, epochs: 1.5}", "train.max_steps=14", *keys)
    plan, data = prepare_run(Run.start("train", recipe))
    folder = UPath(tmp_path / "run")
    ending = train(plan, data, start_worker(recipe.train), folder)
    assert ending.step == 14
    assert recorded_difficulty(recipe, data, folder).tolist() == list(map(float, data.train.lengths))


@pytest.mark.parametrize(
    ("curriculum", "rule"),
    [("{by: column}", "recipe.missing"), ("{column: hard}", "keys.contradict"), ("{model: some/1}", "keys.contradict")],
)
def test_wrong_keys_are_refused(tmp_path: Path, curriculum: str, rule: str) -> None:
    with refused(rule, "train.curriculum"):
        recipe_of(tmp_path, curriculum)


def test_a_difficulty_that_cannot_be_known_is_refused_before_the_run(tmp_path: Path) -> None:
    folder = UPath(tmp_path / "run")
    recipe = recipe_of(tmp_path, "{by: column, column: missing}")
    data = prepare(recipe)
    with refused("columns.missing", "train.curriculum.column"):
        require_difficulty(recipe, data, folder)
    hard = recipe_of(tmp_path, "{by: column, column: hard}")
    write_texts(tmp_path, cell="very")
    with refused("number.invalid", "train.curriculum.column"):
        require_difficulty(hard, data, folder)
    digits = load_recipe(ROOT / "recipes/digits.yaml", ["train.curriculum={by: length}"])
    with refused("curriculum.one_length", "train.curriculum.by"):
        require_difficulty(digits, prepare(digits), folder)
    assert not folder.exists()
