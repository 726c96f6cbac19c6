"""The study: proposed trials, and stored results."""

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages._rdb.models import TrialModel
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import event, make_url
from sqlalchemy.engine import URL
from upath import UPath

from app.config import Objective, load_recipe
from app.tuning import samplers, trials
from app.tuning.outcome import ParetoTrial, TuneMetrics, best_yaml
from app.tuning.report import write_report
from app.tuning.space import Value
from app.tuning.study import SearchStudy
from tests.studies import MAX_TRIALS, ask, create, recipe_with, resume, space_of
from tests.wording import refused

POPULATION = ("tune.scheduler=pbt",)


def test_the_first_trial_is_the_recipes_own(url: URL) -> None:
    proposal = create(url).ask(MAX_TRIALS)
    assert proposal is not None
    assert proposal.values == space_of(recipe_with()).own_values()


def test_a_value_of_the_recipe_that_the_space_cannot_draw_is_drawn_and_named(
    url: URL, caplog: pytest.LogCaptureFixture
) -> None:
    study = create(url, "train.optimizer.lr=0.7")
    proposal = study.ask(MAX_TRIALS)
    assert proposal is not None
    assert proposal.values["train.optimizer.lr"] <= 0.5
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("app."))
    assert said.startswith("the recipe's own train.optimizer.lr=0.7 is not in tune.space")
    again = study.ask(MAX_TRIALS)
    assert again is not None
    assert study.study.trials[again.number].system_attrs["fixed_params"], "the sampler still draws beside the study"


def test_a_stopped_trial_is_pruned_and_keeps_what_it_reported(url: URL) -> None:
    study = create(url)
    for epoch, value in ((1, 0.9), (2, 0.5)):
        study.report(number := 0 if epoch > 1 else ask(study), epoch, value, cost=(-value, 0.0))
    study.prune(number, "stopped by asha after epoch 2")
    (trial,) = optuna.load_study(study_name="one", storage=str(url)).trials
    assert trial.state == TrialState.PRUNED
    assert trial.intermediate_values == {1: 0.9, 2: 0.5}
    assert trial.user_attrs["cause"] == "stopped by asha after epoch 2"
    metrics = TuneMetrics.of(study, ["val_accuracy"], "the search ended")
    assert (metrics.best_value, metrics.best_trial_epochs, metrics.trials_pruned) == (0.9, 2, 1)


def test_a_trial_that_was_cut_short_is_the_best_by_the_epoch_that_training_would_keep(url: URL, tmp_path: Path) -> None:
    study = create(url)
    for first, second in ((0.6, 0.7), (0.75, 0.5)):
        number = ask(study)
        study.report(number, 1, first + 0.1, cost=(1.0, 0.7))
        study.report(number, 2, first, cost=(1.0, 0.4))  # of equal epochs, the one with the lowest val_loss
        study.report(number, 3, second, cost=(2.0, 0.1))  # kept by another metric
    study.complete(0, [0.7], stopped_early=False)
    assert [trial.number for trial in study.best] == [1]
    study.prune(1, "tune.stop.epochs 4 are trained")
    metrics = TuneMetrics.of(study, ["val_accuracy"], "tune.stop.epochs 4 are trained")
    assert (metrics.best_trial, metrics.best_value, metrics.best_trial_epochs) == (1, 0.75, 3)
    ended = ParetoTrial(trial=1, epochs=3, values=metrics.best_values, params=metrics.best_params)
    (file := tmp_path / "best.yaml").write_text(best := best_yaml(recipe_with(), ended, "one"), encoding="utf-8")
    assert "# val_accuracy 0.75 in 3 epochs: trial 1 of study one." in best
    assert str(load_recipe(file).tuned_from) == "trial 1 of one"


@pytest.mark.parametrize(("epoch", "trained"), [(5, 3), (1, 3)])
def test_a_trial_that_goes_on_from_another_counts_the_epochs_that_it_trained(
    url: URL, epoch: int, trained: int
) -> None:
    before = create(url, *POPULATION)
    proposal = before.ask(MAX_TRIALS)
    assert proposal is not None
    for own in (1, 2):
        before.report(proposal.number, own, 0.9, cost=(-0.9, 0.0))
    others = {**proposal.values, "train.optimizer.lr": 0.0123}
    before.record_clone(proposal.number, others, epoch)
    before.report(proposal.number, epoch + 1, 0.5, cost=(-0.5, 0.0))
    assert before.best[0].user_attrs["kept"][1] == 0.5, "its own best weights are gone"
    after = resume(url, *POPULATION)
    again = after.ask(MAX_TRIALS)
    assert again is not None
    assert (again.values, after.last_reported_epoch(again.number)) == (others, epoch + 1)
    after.record_clone(again.number, others, epoch + 1)  # nothing new
    assert after.epochs_trained == trained


class Onlooker(optuna.samplers.RandomSampler):
    """Keeps what it is shown."""

    shown: list[FrozenTrial]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        self.shown = [finished for finished in study.get_trials() if finished.number != trial.number]
        return super().infer_relative_search_space(study, trial)


def test_samplers_and_later_searches_learn_of_the_values_that_a_trial_of_a_population_had_at_last(
    url: URL, memory: Path
) -> None:
    study, last = create(url, *POPULATION), {"train.optimizer.lr": 0.0123}
    proposal = study.ask(MAX_TRIALS)
    assert proposal is not None
    study.record_clone(proposal.number, {**proposal.values, **last}, epoch=1)
    study.report(proposal.number, 2, 0.9, cost=(-0.9, 0.0))
    study.complete(proposal.number, [0.9], stopped_early=False)
    study.study.sampler = sampler = Onlooker(seed=0)
    config = recipe_with(*POPULATION).tune
    assert config is not None
    ask(SearchStudy(study.study, url, study.space, config))
    assert [item.params["train.optimizer.lr"] for item in sampler.shown] == [0.0123]
    later = create(make_url(f"sqlite:///{memory / 'later.db'}"), name="two", earlier=[("one", url)])
    proposals = [later.ask(MAX_TRIALS) for _ in range(2)]
    assert [proposal.values["train.optimizer.lr"] for proposal in proposals if proposal] == [0.003, 0.0123]
    learned = [trial.params for trial in later.study.trials if "learned_from" in trial.user_attrs]
    assert [item["train.optimizer.lr"] for item in learned] == [0.0123]


def test_a_trial_that_failed_is_never_the_best(url: URL) -> None:
    study = create(url)
    for value in (0.9, 0.4):
        study.report(ask(study), 1, value, cost=(-value, 0.0))
    study.fail(0, "NonFiniteLossError: step 3")
    study.complete(1, [0.4], stopped_early=False)
    assert [trial.number for trial in study.best] == [1]


def test_a_search_in_which_everything_failed_says_why(url: URL) -> None:
    study = create(url)
    study.fail(ask(study), "NonFiniteLossError: step 3")
    study.study.tell(ask(study), state=TrialState.FAIL)  # nobody knows why
    with refused("trials.none_complete"):
        TuneMetrics.of(study, ["val_accuracy"], None)


def test_there_are_as_many_trials_as_were_asked_for(url: URL) -> None:
    study = create(url)
    assert [study.ask(2) is None for _ in range(3)] == [False, False, True]


def test_a_trial_at_which_the_space_fails_is_filed_and_the_search_goes_on(
    url: URL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tune_spaces.image

    problem: list[BaseException] = []

    def space(trial: optuna.Trial) -> None:
        trial.suggest_float("train.optimizer.lr", 1e-4, 0.1)
        if problem:
            raise problem[0]

    monkeypatch.setattr(tune_spaces.image, "space", space)
    before = create(url)
    problem[:] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        before.ask(MAX_TRIALS)
    problem.clear()
    after = resume(url)
    problem[:] = [RuntimeError("no table of rates")]
    assert after.ask(2) is None
    cause = "tune.space 'tune_spaces.image:space' fails: RuntimeError: no table of rates"
    assert [(trial.state, trial.user_attrs["cause"]) for trial in after.ended] == [(TrialState.FAIL, cause)] * 2
    assert f"trial 1 cannot be drawn: {cause}" in caplog.text
    problem.clear()
    assert ask(after) == 2


def test_a_key_of_a_branch_that_was_not_walked_is_checked_when_it_is_drawn(
    url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tune_spaces.image

    def space(trial: optuna.Trial) -> None:
        if trial.suggest_float("train.optimizer.lr", 1e-4, 0.1) == 0.003:  # the recipe's own
            trial.suggest_float("train.optimizer.momentun", 0.8, 0.99)

    monkeypatch.setattr(tune_spaces.image, "space", space)
    study = create(url)
    assert ask(study) == 1
    (failed,) = study.ended
    assert "names train.optimizer.momentun, and recipe digits has no such key" in failed.user_attrs["cause"]


@pytest.mark.parametrize(
    ("sampler", "learns", "num_trials"),
    [
        ("tpe", True, 5),
        ("cmaes", True, 10),
        ("gp", True, 5),
        ("nsga2", True, 10),
        ("random", False, 5),
        ("qmc", False, 5),
    ],
)
def test_what_a_sampler_that_learns_proposes_depends_on_what_it_was_told(
    url: URL, monkeypatch: pytest.MonkeyPatch, sampler: str, learns: bool, num_trials: int
) -> None:
    import tune_spaces.image

    def two(trial: optuna.Trial) -> None:
        trial.suggest_float("train.optimizer.lr", 1e-4, 0.1, log=True)
        trial.suggest_float("train.label_smoothing", 0.0, 0.2)

    def proposed(name: str, sign: float) -> list[dict[str, Value]]:
        study = create(url, f"tune.sampler={sampler}", "tune.random_trials=2", "tune.scheduler=none", name=name)
        seen = []
        for _ in range(num_trials):  # two at random, and cmaes' first six, of which it learns
            proposal = study.ask(MAX_TRIALS)
            assert proposal is not None
            seen.append(proposal.values)
            study.complete(proposal.number, [sign * proposal.values["train.optimizer.lr"]], stopped_early=False)
        return seen

    monkeypatch.setattr(tune_spaces.image, "space", two)
    high_is_good, low_is_good = proposed("high", 1.0), proposed("low", -1.0)
    assert high_is_good[:2] == low_is_good[:2]
    assert (high_is_good != low_is_good) is learns


@pytest.mark.parametrize("sampler", ["grid", "tpe", "random", "gp", "nsga2"])
def test_a_space_of_few_values_is_tried_to_the_last_one_and_nothing_twice(
    url: URL, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    import tune_spaces.image

    def few(trial: optuna.Trial) -> None:
        if trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd":
            trial.suggest_float("train.optimizer.momentum", 0.0, 0.8, step=0.4)

    monkeypatch.setattr(tune_spaces.image, "space", few)
    study, seen = create(url, f"tune.sampler={sampler}", "tune.scheduler=none"), []
    while (proposal := study.ask(MAX_TRIALS)) is not None:
        assert study.exhausted is None
        seen.append(str(proposal.values))
        study.complete(proposal.number, [0.5], stopped_early=False)
    assert len(seen) == len(set(seen)) == 4
    assert "has nothing more to try" in str(study.exhausted)
    filed = len(study.study.trials)
    assert filed == 4 or sampler == "nsga2", "only a sampler that keeps its state in the study files what it repeats"
    assert study.ask(MAX_TRIALS) is None
    assert len(study.study.trials) == filed


def test_a_repeated_trial_is_filed_with_the_outcome_of_the_first(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    import tune_spaces.image

    def two(trial: optuna.Trial) -> None:
        trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"])

    monkeypatch.setattr(tune_spaces.image, "space", two)
    study = create(url, "tune.sampler=qmc")
    for value in (0.7, 0.8):
        study.complete(ask(study), [value], stopped_early=False)
    assert study.ask(MAX_TRIALS) is None
    assert len(study.trials) == 2
    repeated = study.study.trials[2:]
    assert repeated
    assert {item.value for item in repeated} <= {0.7, 0.8}


def test_of_several_objectives_the_front_is_kept(url: URL, tmp_path: Path) -> None:
    study = create(
        url,
        "tune.metric=[val_accuracy, parameters]",
        "tune.mode=[max, min]",
        "tune.scheduler=none",
        "tune.sampler=nsga2",
    )
    for values in ([0.9, 100.0], [0.8, 50.0], [0.7, 80.0]):
        number = ask(study)
        study.report(number, 1, values[0], cost=(-values[0], 0.0))
        study.complete(number, values, stopped_early=False)
    metrics = TuneMetrics.of(study, ["val_accuracy", "parameters"], None)
    assert [item.trial for item in metrics.pareto_front] == [0, 1]
    assert metrics.best_values == {"val_accuracy": 0.9, "parameters": 100.0}
    assert metrics.epochs_trained == 3
    objectives = [Objective("val_accuracy", "max"), Objective("parameters", "min")]
    few = write_report(study.study, objectives, metrics, UPath(tmp_path)).read_text(encoding="utf-8")
    for title in ("Pareto front", "Importance for val_accuracy", "Importance for parameters"):
        assert f">{title}</h2>" in few
    assert few.count("Not known: it takes 10 complete trials") == 2, "three trials say nothing of importance"
    for accuracy in range(7):
        study.complete(ask(study), [accuracy / 10, 1e6 - accuracy], stopped_early=False)
    page = write_report(study.study, objectives, metrics, UPath(tmp_path)).read_text(encoding="utf-8")
    assert "Not known" not in page
    assert page.count('class="bars"') == 2


def test_a_trial_that_waits_is_known_to_the_sampler_and_goes_on_after_a_restart(url: URL) -> None:
    before = create(url)
    first = before.ask(MAX_TRIALS)
    assert first is not None
    before.report(first.number, 1, 0.4, cost=(-0.4, 0.0))
    before.pause(first.number)
    after = resume(url)
    second = after.ask(MAX_TRIALS)
    assert second is not None
    assert second.number == 1  # the first one is not begun anew
    assert after.unpause(first.number) == first
    after.report(first.number, 2, 0.7, cost=(-0.7, 0.0))
    after.complete(first.number, [0.7], stopped_early=False)
    after.pause(second.number)
    after.prune(second.number, "not promoted")
    states = [trial.state for trial in resume(url).ended]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED]


def test_trials_that_wait_are_not_read_anew_and_all_that_is_written_is_known(url: URL) -> None:
    study, read = create(url), []
    for _ in range(12):
        number = ask(study)
        study.report(number, 1, number / 100, cost=(-number / 100, 0.0))
        study.pause(number)
    note = lambda row, _: read.append(row.number)  # noqa: E731
    event.listen(TrialModel, "load", note)
    number = ask(study)
    event.remove(TrialModel, "load", note)
    assert set(read) == {11, 12}, "but for the one that was written last, and the new one"
    study.record_failure(number, "killed")
    study.fail(number, "killed again")
    study.unpause(3)
    study.report(3, 2, 0.5, cost=(-0.5, 0.0))
    study.complete(3, [0.5], stopped_early=False)
    known = study.study.get_trials(deepcopy=False)
    assert known == optuna.load_study(study_name="one", storage=str(url)).trials
    assert [item.state for item in known].count(TrialState.RUNNING) == 11


def test_a_proposal_makes_ready_only_the_trials_that_are_new(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TrialState] = []

    def make(**given: Any) -> FrozenTrial:
        made.append(given["state"])
        return create_trial(**given)

    monkeypatch.setattr(samplers, "create_trial", make)
    study = create(url)
    for _ in range(8):
        made.clear()
        study.complete(ask(study), [0.5], stopped_early=False)
    assert made == [TrialState.COMPLETE], "the last one that ended"


def test_a_front_is_found_without_comparing_every_trial_with_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    study, compared = optuna.create_study(directions=["minimize", "minimize"]), []
    for number in range(100):
        study.add_trial(create_trial(values=[number % 50, 3.0 if number % 50 else 9.0]))
    dominates = trials._dominates
    monkeypatch.setattr(trials, "_dominates", lambda one, other: compared.append(one) or dominates(one, other))
    assert [trial.number for trial in trials.best_trials(study)] == [0, 50, 1, 51]
    assert len(compared) < 4 * 100


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", "qmc"])
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_sampler_takes_any_seed(sampler: str, seed: int, url: URL) -> None:
    study = create(url, f"tune.seed={seed}", f"tune.sampler={sampler}", "tune.scheduler=none")
    assert [study.ask(max_trials=9) for _ in range(3)]
