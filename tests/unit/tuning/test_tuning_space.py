"""Search spaces are looked at before anything is run."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import optuna
import pytest
from ray import tune
from ray.tune.search.sample import Integer

from app.config import Recipe, load_recipe
from app.tuning.space import Space, load_space
from app.tuning.trial_config import trial_recipe
from tests.helpers import ROOT
from tests.wording import refused

RECIPE = str(ROOT / "recipes/digits.yaml")
LR = "train.optimizer.lr"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RECIPE)


@pytest.fixture
def define(recipe: Recipe) -> Iterator[Callable[[object], Space]]:
    """Loads a space as a user's module holds it."""
    module = ModuleType("users_space")
    sys.modules[module.__name__] = module

    def load(space: object) -> Space:
        module.space = space  # type: ignore[attr-defined]
        return load_space("users_space:space", recipe)

    yield load
    del sys.modules[module.__name__]


def draw(space: Space, seed: int = 0) -> dict[str, object]:
    return space.draw(optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask())


def misspelt(trial: optuna.Trial) -> None:
    trial.suggest_float("train.optimizer.momentun", 0.8, 0.99)


def under_a_choice(trial: optuna.Trial) -> None:
    if trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd":
        misspelt(trial)


def under_two_choices(trial: optuna.Trial) -> None:
    sgd = trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd"
    if trial.suggest_categorical("train.schedule.name", ["cosine", "constant"]) == "constant" and sgd:
        misspelt(trial)


def above_the_low_end(trial: optuna.Trial) -> None:
    if trial.suggest_int("model.args.width", 8, 24, step=8) == 16:
        misspelt(trial)


def at_the_end_of_a_long_way(trial: optuna.Trial) -> None:
    if all(trial.suggest_float(key, 0.1, 0.2) == 0.2 for key in MANY):
        misspelt(trial)


MANY = ["train.optimizer.lr", "train.optimizer.weight_decay", "train.label_smoothing", "train.schedule.warmup_fraction"]


@pytest.mark.parametrize("space", [under_a_choice, under_two_choices, above_the_low_end, at_the_end_of_a_long_way])
def test_a_branch_that_is_taken_seldom_is_walked_too(define: Callable[[object], Space], space: object) -> None:
    with refused("space.key_unknown", "tune.space"):
        define(space)


def test_of_a_space_with_very_many_branches_a_thousand_are_walked(define: Callable[[object], Space]) -> None:
    draws = 0

    def space(trial: optuna.Trial) -> None:
        nonlocal draws
        draws += 1
        for key in MANY:
            for _ in range(2):  # drawn again, a key keeps its value
                trial.suggest_categorical(key, [0.1, 0.2])
        for key in ("model.args.width", "train.global_batch_size", "train.epochs", "train.seed"):
            trial.suggest_int(key, 1, 100)

    define(space)
    assert draws == 1000


@pytest.mark.parametrize(
    "file",
    [
        *("breast_cancer", "diabetes", "digit_halves", "digits", "fashion", "function_lines", "functions"),
        *("reviews", "stdlib_gpt", "tumour_extremes"),
    ],
)
def test_the_spaces_that_come_with_rayloom_fit_their_recipes(file: str) -> None:
    own = load_recipe(ROOT / f"recipes/{file}.yaml")
    assert own.tune is not None
    space = load_space(own.tune.space, own)
    for seed in range(20):
        trial_recipe(own, draw(space, seed), own.tune)
    assert space.contains(space.own_values())
    assert space.values_outside() == {}


def test_a_space_draws_keys_of_sections_that_the_recipe_leaves_out(recipe: Recipe) -> None:
    assert recipe.train.augment is None
    assert recipe.tune
    space = load_space("tune_spaces.image:augmentation", recipe)
    augments = [trial_recipe(recipe, draw(space, seed), recipe.tune).train.augment for seed in range(10)]
    assert all(augment and augment.image and augment.mix for augment in augments)
    assert len({augment.mix.mixup for augment in augments if augment and augment.mix}) == 10
    assert {augment.image.flip for augment in augments if augment and augment.image} == {0.0, 0.5}
    assert not any(key.startswith("train.augment") for key in space.own_values())
    assert space.values_outside()["train.augment.image.crop"] is None


@pytest.mark.parametrize(
    ("space", "rule"),
    [
        (lambda trial: trial.suggest_float("train.optimizer.lr", 0.1, 0.01), "space.range"),
        (lambda trial: trial.suggest_float("train.optimizer.lr", 0.0, 0.1, log=True), "space.range"),
        (lambda trial: trial.suggest_categorical("train.optimizer.name", []), "space.no_choices"),
        (
            lambda trial: {"train.optimizer.lr": 1}[trial.suggest_categorical("train.optimizer.name", ["adamw"])],
            "space.fails",
        ),
        (lambda trial: {"train.optimizr.lr": trial.suggest_float("train.optimizer.lr", 0.1, 0.2)}, "space.key_unknown"),
        (lambda trial: {"train.seed": trial.suggest_int("train.epochs", 1, 1) / 2}, "space.value"),
        (lambda trial: {"train.seed": trial.suggest_int("train.epochs", 1, 2) and RECIPE.join}, "space.value"),
        (lambda trial: trial.suggest_float("train.optimizer.lr", -0.1, 0.1) and None, "space.value"),
        (lambda trial: trial.suggest_categorical("train.optimizer.name", ["adam"]) and None, "space.value"),
        (lambda trial: trial.suggest_int("train.workers", 1, 2) and None, "space.key_not_searched"),
        (lambda trial: trial.suggest_int("train.plan.tensor", 1, 2) and None, "space.key_not_searched"),
        (lambda trial: trial.suggest_float("train.cpus_per_worker", 1, 2) and None, "space.key_not_searched"),
        (lambda trial: trial.suggest_int("serve.replicas", 1, 2) and None, "space.key_not_searched"),
        (lambda trial: None, "space.draws_nothing"),
        (
            lambda trial: (
                (
                    trial.suggest_float(LR, 0.1, 0.5)
                    if trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd"
                    else trial.suggest_float(LR, 1e-4, 1e-2)
                )
                and None
            ),
            "space.differs",
        ),
        (lambda trial: trial.suggest_int("data.seed", 0, 5) and None, "space.key_not_searched"),
        (lambda trial: trial.suggest_float("data.validation_fraction", 0.1, 0.5) and None, "space.key_not_searched"),
        (lambda trial: trial.suggest_int("data.clean.min_length", 1, 9) and None, "space.key_not_searched"),
        (lambda trial: {"data.group_column": trial.suggest_categorical(LR, [0.1]) and "a"}, "space.key_not_searched"),
        (3, "space.type"),
        ({"train.optimizer.lr": tune.qloguniform(1e-4, 1e-1, 1e-5)}, "space.range"),
        ({"train.optimizer.lr": tune.randn()}, "space.range"),
        ({"train.gradient_clipping": tune.qloguniform(1, 100, 1)}, "space.range"),
        ({"model.args.width": tune.qrandint(10, 12, 8)}, "space.range"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(
    define: Callable[[object], Space], space: object, rule: str
) -> None:
    with refused(rule, "tune.space"):
        define(space)


@pytest.mark.parametrize(
    ("file", "key", "metric", "is_comparable"),
    [
        ("stdlib_gpt", "data.tokenizer.vocab_size", "val_loss", False),
        ("docstrings", "train.temperature", "val_loss", False),
        ("docstrings", "train.temperature", "val_mrr", True),
        ("docstrings", "train.temperature", "train_loss", False),
        ("digits", "train.label_smoothing", "train_loss", False),
        ("digits", "train.label_smoothing", "val_loss", True),
        ("digits", "train.augment.mix.mixup", "train_loss", False),
        ("digits", "train.optimizer.lr", "train_loss", True),
        ("reviews", "data.tokenizer.vocab_size", "val_loss", True),
    ],
)
def test_trials_whose_metric_means_something_else_are_refused(
    file: str, key: str, metric: str, is_comparable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("users_space")
    module.space = {key: tune.choice([300, 400] if "vocab" in key else [0.05, 0.1])}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    section = f"tune={{space: users_space:space, metric: {metric}}}"
    recipe = load_recipe(ROOT / f"recipes/{file}.yaml", [section])
    if is_comparable:
        assert key in draw(load_space("users_space:space", recipe))
        return
    with refused("space.key_not_searched", "tune.space"):
        load_space("users_space:space", recipe)


def test_what_a_space_derives_comes_back_from_the_study_as_it_was(define: Callable[[object], Space]) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        beta = trial.suggest_float("train.label_smoothing", 0.0, 0.1)
        return {"model.args.width": np.int64(16), "train.optimizer.betas": (0.9, beta)}

    values = draw(define(space))
    assert json.loads(json.dumps(values)) == values
    assert values["model.args.width"] == 16


def test_a_grid_over_a_range_without_steps_is_refused() -> None:
    with refused("space.no_steps", "tune.space"):
        load_space("tune_spaces.image:space", load_recipe(RECIPE, ["tune.sampler=grid"]))


def test_ray_tunes_spaces_are_taken(define: Callable[[object], Space]) -> None:
    space = define(
        {
            "train.optimizer.lr": tune.loguniform(1e-4, 1e-1),
            "model.args.width": tune.randint(1, 4),
            "train.optimizer.name": tune.grid_search(["adamw", "sgd"]),
            "train.label_smoothing": 0.1,
        }
    )
    seen = [draw(space, seed) for seed in range(30)]
    assert {item["model.args.width"] for item in seen} == {1, 2, 3}  # Ray Tune leaves the upper end out
    assert {item["train.optimizer.name"] for item in seen} == {"adamw", "sgd"}
    assert all(1e-4 <= float(str(item["train.optimizer.lr"])) <= 1e-1 for item in seen)
    assert all(item["train.label_smoothing"] == 0.1 for item in seen)


@pytest.mark.parametrize(
    "domain", [tune.qrandint(10, 100, 30), tune.qrandint(8, 32, 8), tune.qrandint(1, 4, 1), tune.qlograndint(1, 4, 1)]
)
def test_quantized_integers_are_multiples_as_in_ray_tune(define: Callable[[object], Space], domain: Integer) -> None:
    space = define({"model.args.width": domain})
    assert {draw(space, seed)["model.args.width"] for seed in range(60)} == {*domain.sample(size=300)}


def test_a_trial_has_as_few_workers_as_its_plan_needs() -> None:
    recipe = load_recipe(RECIPE, ["alerts=[{metric: loss, not_finite: true, do: [stop]}]"])
    assert recipe.tune is not None
    alone = trial_recipe(recipe, {"train.optimizer.lr": 0.1}, recipe.tune)
    assert (alone.train.workers, alone.train.optimizer.lr, alone.alerts) == (1, 0.1, [])
    cut = load_recipe(RECIPE, ["train.plan.tensor=2"])
    assert trial_recipe(cut, {}, recipe.tune).train.workers == 2
    assert trial_recipe(recipe, {}, recipe.tune.model_copy(update={"workers": 4, "epochs": 2})).train.workers == 4
    shortened = recipe.tune.model_copy(update={"max_steps": 7})
    assert trial_recipe(recipe, {}, shortened).train.max_steps == 7
    assert trial_recipe(recipe, {"train.max_steps": 5}, shortened).train.max_steps == 5, "what is searched counts"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tune.trials=24"], 8),
        (["tune.trials=6"], 4),
        (["tune.trials=24", "tune.random_trials=0"], 0),
    ],
)
def test_a_third_of_the_trials_is_drawn_at_random_unless_the_recipe_says_how_many(
    overrides: list[str], expected: int
) -> None:
    tune = load_recipe(RECIPE, overrides).tune
    assert tune is not None
    assert tune.startup_trials == expected


@pytest.mark.parametrize(
    ("overrides", "rule", "key"),
    [
        (["tune.metric=f1"], "metric.unknown", "tune.metric"),
        (["tune.metric=val_own", "tune.mode=[]"], "mode.missing", "tune"),
        (["tune.mode=min"], "metric.direction", "tune.mode"),
        (["tune.metric=[val_accuracy, parameters]", "tune.mode=[max, min]"], "scheduler.one_value", "tune"),
        (["tune.sampler=gp"], "sampler.scheduler", "tune"),
        (["tune.metric=val_perplexity", "tune.mode=min"], "metric.unknown", "tune.metric"),
        (["tune.storage=postgresql://me:hunter2@db/studies"], "secret.in_recipe", None),
        (["tune.trials=0"], "recipe.greater_than", "tune.trials"),
        (["tune.scheduler=ash"], "recipe.literal_error", "tune.scheduler"),
    ],
)
def test_a_tune_section_that_makes_no_sense_is_refused(overrides: list[str], rule: str, key: str | None) -> None:
    with refused(rule, key) as error:
        load_recipe(RECIPE, overrides)
    assert "hunter2" not in str(error.value)


def test_a_space_is_found_in_the_working_directory(recipe: Recipe, tmp_path: Path) -> None:
    with refused("import.fails"):
        load_space("tune_spaces.imag:space", recipe)
