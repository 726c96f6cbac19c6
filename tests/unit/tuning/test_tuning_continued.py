"""A continued search: its warm start from an earlier one, and the studies that it may continue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from upath import UPath

import tune_spaces.image
from app.config import PlanConfig
from app.repository.repository import Repository
from app.tuning.outcome import TuneMetrics
from app.tuning.space_explorer import Suggester
from app.tuning.study import SearchStudy
from app.tuning.trial_data import with_versions
from app.tuning.trials import last_params
from tests.engine_contract import PROCESSOR, SIGNATURE
from tests.studies import MAX_TRIALS, ask, create, placed, recipe_with, resume, space_of
from tests.toy import publish_version
from tests.wording import refused


def test_a_study_of_auto_is_resumed_as_that_of_the_default_plan(url: URL) -> None:
    study = create(url, "train.plan=auto")
    study.report(ask(study), 1, 0.5, cost=(-0.5, 0.0))
    for plan in ("auto", "{zero_stage: 1}"):
        assert [trial.intermediate_values for trial in resume(url, f"train.plan={plan}").trials] == [{1: 0.5}]
    with refused("study.differs"):
        resume(url, "train.plan={zero_stage: 3}")


def test_a_search_that_was_cut_off_repeats_nothing_and_retries_what_ran(url: URL) -> None:
    before = create(url)
    done, running = ask(before), before.ask(MAX_TRIALS)
    before.report(done, 1, 0.8, cost=(-0.8, 0.0))
    before.complete(done, [0.8], stopped_early=False)
    assert running is not None
    before.report(running.number, 1, 0.4, cost=(-0.4, 0.0))
    after = resume(url)
    again = after.ask(MAX_TRIALS)
    assert again == running
    assert (after.last_reported_epoch(again.number), before.last_reported_epoch(running.number)) == (1, 1)
    after.report(again.number, 2, 0.6, cost=(-0.6, 0.0))
    after.complete(again.number, [0.6], stopped_early=True)
    assert [trial.intermediate_values for trial in after.trials] == [{1: 0.8}, {1: 0.4, 2: 0.6}]
    fresh = [ask(after) for _ in range(3)]
    assert fresh == [2, 3, 4]
    assert len({str(trial.user_attrs["values"]) for trial in after.trials}) == 5
    metrics = TuneMetrics.of(after, ["val_accuracy"], None)
    assert (metrics.best_trial, metrics.epochs_trained, metrics.trials_stopped_early) == (0, 3, 1)


def test_a_search_learns_from_an_earlier_one(url: URL, memory: Path) -> None:
    earlier = create(url)
    values = []
    for number in range(4):
        proposal = earlier.ask(MAX_TRIALS)
        assert proposal is not None
        values.append(proposal.values)
        earlier.complete(number, [number / 10], stopped_early=False)
    later = create(make_url(f"sqlite:///{memory / 'later.db'}"), name="two", earlier=[("one", url)])
    assert later.trials == []
    assert len(later.study.trials) == 4 + 2  # and two that wait: its own values, and the best of before
    proposals = [later.ask(MAX_TRIALS) for _ in range(2)]
    assert [proposal and proposal.values for proposal in proposals] == [values[0], values[3]]
    with refused("study.unknown"):
        create(make_url(f"sqlite:///{memory / 'x.db'}"), name="x", earlier=[("three", url)])
    nowhere = make_url(f"sqlite:///{memory / 'four.db'}")
    with refused("study.unknown", "tune.warm_start"):
        create(make_url(f"sqlite:///{memory / 'x.db'}"), name="x", earlier=[("four", nowhere)])


@pytest.mark.parametrize(
    "overrides",
    [
        ["tune.metric=val_loss", "tune.mode=min"],
        ["train.epochs=3"],
        ["tune.epochs=3"],
        ["tune.scheduler=median"],
        ["tune.grace_epochs=2"],
        ["tune.reduction_factor=2"],
    ],
)
def test_a_study_of_another_question_is_refused(url: URL, overrides: list[str]) -> None:
    create(url)
    with refused("study.differs"):
        resume(url, *overrides)


def test_a_study_from_before_a_key_was_added_goes_on_while_the_key_has_its_default(url: URL) -> None:
    study = create(url).study
    started_with = study.user_attrs["recipe"]
    del started_with["data"]["test_fraction"], started_with["data"]["test_source"]
    del started_with["train"]["sync_batch_norm"]
    study.set_user_attr("recipe", started_with)
    assert resume(url).study.study_name == "one"
    with refused("study.differs"):
        resume(url, "train.sync_batch_norm=true")


def test_a_study_goes_on_whether_it_recorded_auto_or_the_default_plan(url: URL) -> None:
    study = create(url).study
    started_with = study.user_attrs["recipe"]
    for recorded in ("auto", PlanConfig().model_dump(mode="json")):
        started_with["train"]["plan"] = recorded
        study.set_user_attr("recipe", started_with)
        assert resume(url).study.study_name == "one"
    with refused("study.differs"):
        resume(url, "train.plan={zero_stage: 3}")


def test_a_study_that_recorded_a_teacher_by_name_goes_on_with_its_version(url: URL) -> None:
    study = create(url).study
    started_with = study.user_attrs["recipe"]
    started_with["train"]["teacher"] = {"model": "large"}
    study.set_user_attr("recipe", started_with)
    assert resume(url, "train.teacher={model: large/3}").study.study_name == "one"
    with refused("study.differs"):
        resume(url, "train.teacher={model: other/3}")


def test_trials_that_draw_teachers_by_name_have_one_version_of_each(
    url: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, names = UPath(tmp_path), ("large", "small")
    for name in names:
        for _ in range(2):
            publish_version(storage, name, b"", SIGNATURE, PROCESSOR, ["no", "yes"])
        Repository(storage).promote(name, 1)

    def space(trial: Suggester) -> Mapping[str, Any]:
        trial.suggest_float("train.optimizer.lr", 0.001, 0.1, step=None, log=False)
        drawn = trial.suggest_categorical("train.teacher.model", names)
        return {"train.curriculum": {"by": "loss", "model": drawn}}

    monkeypatch.setattr(tune_spaces.image, "space", space)
    recipe = recipe_with(f"storage={storage}")
    assert recipe.tune
    found = with_versions(space_of(recipe), storage)
    study = SearchStudy.create("one", placed(url), found, recipe, recipe.tune)
    proposals = [study.ask(8) for _ in range(4)]
    for name in names:
        Repository(storage).promote(name, 2)
    resumed = resume(url)
    proposals += [resumed.ask(8) for _ in range(8)]  # the first ones repeat the trials that ran
    given = [proposal.values for proposal in proposals if proposal]
    assert {values["train.teacher.model"] for values in given} == {"large/1", "small/1"}
    assert all(values["train.curriculum"]["model"] == values["train.teacher.model"] for values in given)
    # In population-based training, a trial may take over another's teacher.
    other = next(values for values in given if values["train.teacher.model"] != given[0]["train.teacher.model"])
    resumed.record_clone(1, other, epoch=1)
    learned = last_params(resumed.trials[1], resumed.space)
    assert learned["train.optimizer.lr"] == other["train.optimizer.lr"]
    assert f"{learned['train.teacher.model']}/1" == other["train.teacher.model"]


def test_a_study_of_another_space_is_refused(url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    create(url)
    monkeypatch.setattr(
        tune_spaces.image, "space", lambda trial: trial.suggest_float("train.optimizer.lr", 0.1, 1) and None
    )
    with refused("study.differs"):
        resume(url)


def test_two_searches_never_share_a_study(url: URL) -> None:
    create(url)
    with refused("study.taken"):
        create(url)
