"""Errors of Pydantic in plain words."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from app.problems import problems_of


class Fixed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int


class Share(BaseModel):
    model_config = ConfigDict(extra="forbid")
    part: float


class Recipe(BaseModel):
    sample: Fixed | Share | str
    pair: int | tuple[int, int] = 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        # One kind knows the key, so its value is wrong, and the key is not unknown.
        ({"sample": {"part": "half"}}, [("sample.part", "a number")]),
        ({"sample": {"none": 1}}, [("sample.size", "a value")]),
        ({"sample": "all", "pair": [1]}, [("pair.1", "a value")]),
        ({}, [("sample", "a value")]),
    ],
)
def test_one_mistake_is_one_problem_in_our_words(given: dict[str, Any], found: list[tuple[str, str]]) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Recipe).validate_python(given)
    problems = list(problems_of(refused.value, given))
    assert [(problem.key, problem.expected) for problem in problems] == found
    assert not [problem for problem in problems if "Field required" in problem.expected or "Extra" in problem.expected]
