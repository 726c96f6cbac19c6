"""Who ends trials: what a search that goes on tells them, and what they leave alone."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from optuna.trial import FrozenTrial, TrialState, create_trial
from ray.tune.schedulers import TrialScheduler
from sqlalchemy.engine import URL
from upath import UPath

import tune_spaces.image
from app.config import Objective, Recipe, load_recipe
from app.config.metrics import Mode
from app.tuning.budget import SearchBudget
from app.tuning.promotion import Promotion
from app.tuning.ray_internals import Halving
from app.tuning.schedulers import create_scheduler, replay
from app.tuning.search import Search
from app.tuning.searcher import StudySearcher
from app.tuning.space import load_space
from app.tuning.space_explorer import Suggester
from app.tuning.trial_config import CLONED, ENDED, EPOCH, LAST_REPORTED_EPOCH, NUMBER, VALUE, VALUES
from tests.helpers import ROOT
from tests.studies import ask, create, recipe_with, space_of

EPOCHS = 4
LR, MOMENTUM = "train.optimizer.lr", "train.optimizer.momentum"


def scheduler_of(name: str) -> TrialScheduler:
    recipe: Recipe = load_recipe(ROOT / "recipes/digits.yaml", [f"tune.scheduler={name}"])
    assert recipe.tune is not None
    return create_scheduler(recipe.tune, EPOCHS, load_space("tune_spaces.image:space", recipe))


def past(value: float, state: TrialState = TrialState.COMPLETE) -> FrozenTrial:
    known = value if state == TrialState.COMPLETE else None
    return create_trial(state=state, value=known, intermediate_values=dict.fromkeys((1, 2, 3, 4), value))


class Trial:
    """As much of a trial of Ray Tune's as these schedulers look at."""

    def __init__(self, number: int = 0) -> None:
        self.trial_id = f"trial-{number}"
        self.config: dict[str, Any] = {NUMBER: number}


def told(scheduler: TrialScheduler, trial: Trial, epoch: int, value: float) -> str:
    controller = SimpleNamespace(get_live_trials=list)
    return str(scheduler.on_trial_result(controller, trial, {EPOCH: epoch, VALUE: value}))


def test_a_trial_that_ends_at_a_rung_counts_there_and_is_not_promoted() -> None:
    promotion = Promotion(EPOCHS, grace=1, factor=2, mode="max")
    config = recipe_with("tune.scheduler=asha").tune
    assert config is not None
    scheduler = create_scheduler(config, EPOCHS, space_of(recipe_with()), promotion)
    scheduler.on_trial_complete(None, Trial(0), {EPOCH: 1, VALUE: 0.9, ENDED: True})
    for number, value in ((1, 0.5), (2, 0.4)):
        assert told(scheduler, Trial(number), 1, value) == TrialScheduler.STOP
        scheduler.on_trial_complete(None, Trial(number), {EPOCH: 1, VALUE: value})
    assert promotion.promote() is None
    assert promotion.promote(at_least=1) is None
    assert told(scheduler, Trial(3), 1, 0.8) == TrialScheduler.CONTINUE


def test_a_search_that_goes_on_compares_with_the_trials_before_it() -> None:
    scheduler = scheduler_of("median")
    replay(scheduler, [past(0.9 + number / 1000) for number in range(40)])
    scheduler.on_trial_add(None, trial := Trial())
    assert told(scheduler, trial, 1, 0.1) == TrialScheduler.STOP


@pytest.mark.parametrize(("mode", "good"), [("max", 0.9), ("min", 0.1)])
def test_hyperband_ends_trials_whose_metric_is_not_finite(mode: Mode, good: float) -> None:
    assert isinstance(scheduler_of("hyperband"), Halving)
    scheduler = Halving(time_attr=EPOCH, metric=VALUE, mode=mode, max_t=EPOCHS, reduction_factor=4, brackets=1)
    values = [good, *[Objective("val_loss", mode).worst] * 20, 0.5]
    trials = [Trial(number) for number in range(len(values))]
    for trial in trials:
        scheduler.on_trial_add(None, trial)
    decisions = [told(scheduler, trial, 1, value) for trial, value in zip(trials, values, strict=True)]
    assert decisions == ["CONTINUE", *["STOP"] * 20, "CONTINUE"]


def test_every_bracket_of_a_search_that_goes_on_compares_with_the_trials_before_it() -> None:
    scheduler = scheduler_of("hyperband")
    replay(scheduler, [past(0.9 + number / 1000) for number in range(100)])
    new = [Trial(number) for number in range(20)]  # each drawn into a bracket by chance, the last of which ends nobody
    for trial in new:
        scheduler.on_trial_add(None, trial)
    stopped = [trial for trial in new if any(told(scheduler, trial, epoch, 0.1) == "STOP" for epoch in (1, 2, 3))]
    assert stopped


def test_a_search_that_goes_on_does_not_compare_with_trials_that_failed() -> None:
    scheduler = scheduler_of("median")
    replay(scheduler, [past(0.9, TrialState.FAIL) for _ in range(40)])
    scheduler.on_trial_add(None, trial := Trial())
    assert told(scheduler, trial, 1, 0.1) == TrialScheduler.CONTINUE


def test_a_trial_with_too_few_to_compare_with_goes_on() -> None:
    scheduler = scheduler_of("median")
    replay(scheduler, [past(0.9), past(0.8)])
    scheduler.on_trial_add(None, trial := Trial())
    assert [told(scheduler, trial, epoch, 0.1) for epoch in (1, 2, 3)] == [TrialScheduler.CONTINUE] * 3


def test_an_epoch_without_a_number_does_not_spoil_the_mean_of_a_trial() -> None:
    scheduler = scheduler_of("median")
    replay(scheduler, [past(0.5 + number / 1000) for number in range(40)])
    scheduler.on_trial_add(None, trial := Trial())
    values = (0.9, -math.inf, 0.9)
    said = [told(scheduler, trial, epoch, value) for epoch, value in enumerate(values, 1)]
    assert said == [TrialScheduler.CONTINUE] * 3


def test_a_trial_without_a_number_is_the_last_to_be_promoted(url: URL) -> None:
    promotion = Promotion(EPOCHS, grace=1, factor=2, mode="max")
    assert [promotion.goes_on(number, 1, value) for number, value in enumerate((-math.inf, 0.5))] == [False, True]
    study = create(url)
    number = ask(study)
    for epoch, value in enumerate((-math.inf, 0.4), 1):
        study.report(number, epoch, value, cost=(-value, 0.0))
        assert [best.number for best in study.best] == [number] * (epoch - 1)


def test_a_population_changes_the_keys_that_a_trial_has_within_their_ranges() -> None:
    scheduler = scheduler_of("pbt")
    space = load_space("tune_spaces.image:space", load_recipe(ROOT / "recipes/digits.yaml"))
    highest: float = space.distributions[LR].high  # type: ignore[attr-defined]
    cloned, trial = Trial(1), Trial(2)
    cloned.config |= {VALUES: {LR: highest, "train.optimizer.name": "adamw"}, LAST_REPORTED_EPOCH: 3}
    trial.config |= {VALUES: {LR: 0.01, MOMENTUM: 0.9, "train.optimizer.name": "sgd"}, LAST_REPORTED_EPOCH: 2}
    scheduler._trial_state[cloned] = SimpleNamespace(last_result={EPOCH: 5})
    for _ in range(50):
        config, _ = scheduler._get_new_config(trial, cloned)
        assert config.keys() == {NUMBER, VALUES, LAST_REPORTED_EPOCH, CLONED}
        assert (config[NUMBER], config[LAST_REPORTED_EPOCH]) == (2, 5)
        assert config[VALUES].keys() == {LR, "train.optimizer.name"}
        assert space.contains(config[VALUES])


def search_on(
    monkeypatch: pytest.MonkeyPatch, url: URL, *overrides: str, grows: bool
) -> tuple[Search, dict[str, float]]:
    """Return a search, and the resources of its cluster as a dictionary that a test may change."""
    cluster = {"CPU": 0.0}
    node = {"Alive": True, "Labels": {}, "Resources": cluster}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    recipe, study = recipe_with(*overrides), create(url, *overrides)
    assert recipe.tune is not None
    budget = SearchBudget(recipe.tune.stop, recipe.tune.objectives[0], 0, 0.0)
    return Search(recipe, recipe.tune, study, UPath("memory://x"), budget, grows), cluster


@pytest.mark.parametrize(
    ("grows", "overrides", "expected"),
    [
        (True, ["tune.trials=30"], [4, 5, 8, 16, 30]),
        (True, ["tune.trials=30", "tune.concurrent=6"], [4, 5, 6, 6, 6]),
        (False, ["tune.trials=30"], [1, 1, 4, 8, 30]),
    ],
)
def test_a_cluster_that_grows_is_asked_for_more_trials_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch, url: URL, grows: bool, overrides: list[str], expected: list[int]
) -> None:
    search, cluster = search_on(monkeypatch, url, *overrides, grows=grows)
    seen = []
    for cluster["CPU"] in (0.0, 1.0, 4.0, 8.0, 40.0):
        seen.append(search.concurrency())
    assert seen == expected


def test_trials_are_proposed_as_the_cluster_grows(monkeypatch: pytest.MonkeyPatch, url: URL) -> None:
    search, cluster = search_on(monkeypatch, url, "tune.trials=30", grows=True)
    searcher = StudySearcher(search.study, 30, None, search.concurrency)

    def proposed() -> int:
        count = 0
        while searcher.suggest("any") is not None:
            count += 1
        return count

    assert [proposed(), proposed()] == [4, 0]
    cluster["CPU"] = 3.0
    assert proposed() == 3
    searcher.on_trial_complete("any")
    assert proposed() == 1


@pytest.mark.parametrize(
    ("overrides", "stages", "derived", "expected"),
    [
        ([], [], {}, True),
        ([], [0, 1, 2], {}, True),
        ([], [2, 3], {}, False),
        ([], [], {"train.plan.zero_stage": 3}, False),
        (["train.plan.zero_stage=3"], [], {}, False),
        (["tune.workers=2"], [], {}, False),
    ],
)
def test_no_actor_runs_another_trial_if_a_trial_may_train_with_zero_3(
    monkeypatch: pytest.MonkeyPatch,
    url: URL,
    overrides: list[str],
    stages: list[int],
    derived: dict[str, int],
    expected: bool,
) -> None:
    def space(trial: Suggester) -> dict[str, int]:
        trial.suggest_float("train.optimizer.lr", 1e-4, 1e-2, step=None, log=True)
        if stages:
            trial.suggest_categorical("train.plan.zero_stage", stages)
        return derived

    monkeypatch.setattr(tune_spaces.image, "space", space)
    search, _ = search_on(monkeypatch, url, *overrides, grows=False)
    assert search.reuses_actors is expected
