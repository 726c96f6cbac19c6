"""Studies over the digits, without a search that runs them."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sqlalchemy.engine import URL

from app.config import Recipe, load_recipe
from app.tuning.space import Space, load_space
from app.tuning.storage import StudyLocation
from app.tuning.study import Proposal, SearchStudy
from app.tuning.trial_config import LAST_REPORTED_EPOCH, NUMBER, VALUES
from tests.helpers import ROOT

MAX_TRIALS = 100


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/digits.yaml", list(overrides))


def space_of(recipe: Recipe) -> Space:
    return load_space("tune_spaces.image:space", recipe)


def placed(where: URL | StudyLocation) -> StudyLocation:
    return where if isinstance(where, StudyLocation) else StudyLocation(where)


def create(
    where: URL | StudyLocation,
    *overrides: str,
    name: str = "one",
    earlier: Sequence[tuple[str, URL | StudyLocation]] = (),
) -> SearchStudy:
    recipe = recipe_with(*overrides)
    assert recipe.tune is not None
    known = [(study, placed(there)) for study, there in earlier]
    return SearchStudy.create(name, placed(where), space_of(recipe), recipe, recipe.tune, known)


def resume(where: URL | StudyLocation, *overrides: str, name: str = "one") -> SearchStudy:
    recipe = recipe_with(*overrides)
    assert recipe.tune is not None
    return SearchStudy.resume(name, placed(where), space_of(recipe), recipe, recipe.tune)


def ask(study: SearchStudy) -> int:
    proposal = study.ask(MAX_TRIALS)
    assert proposal is not None
    return proposal.number


def ray_trial(proposal: Proposal, **known: Any) -> SimpleNamespace:
    """Return the part of Ray Tune's ``Trial`` that the callback reads."""
    config = {NUMBER: proposal.number, VALUES: proposal.values, LAST_REPORTED_EPOCH: 0}
    return SimpleNamespace(**{"config": config, "num_failures": 0, "pickled_error_file": None, **known})


LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def locked(url: URL, seconds: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which holds a study's file for so long, or until the end."""
    command = [sys.executable, "-c", LOCK, str(url.database), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
