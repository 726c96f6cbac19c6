"""Upper bounds on libraries whose private parts are used."""

import tomllib
from itertools import chain

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["deepspeed", "optuna", "ray", "torch", "torchmetrics", "transformers", "uvicorn"])
def test_the_bound_of_a_library_ends_with_the_release_that_is_tested(name: str) -> None:
    (pin,) = [next(iter(pin.specifier)).version for pin in PINS if pin.name == name]
    major, minor = map(int, pin.split(".")[:2])
    texts = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    found = [requirement for requirement in map(Requirement, texts) if requirement.name == name]
    assert found
    assert all(requirement.specifier.contains(pin) for requirement in found)
    assert not any(requirement.specifier.contains(f"{major}.{minor + 1}.0") for requirement in found)
