"""The base class of the recipe's sections, and types that several sections share."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from app.amounts import MAX_AMOUNT, MIN_AMOUNT
from app.errors import RecipeError, short_repr

IMPORT_STRING = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
VersionReference = Annotated[str, Field(pattern=rf"^{NAME}(/[1-9][0-9]*)?$")]
"""A published model: NAME for its production version, or NAME/VERSION."""

LOCATION = "location"
"""Marks a key whose value is the path or URI of what jobs read, or a name in place of one: Annotated[str, LOCATION]."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


_MAX_COUNT = 1_000_000
"""Workers or replicas. A plan's neighbours, for one, are found by trying every degree up to their number."""
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
"""A number of requests or rows. Ray Serve counts requests in 32 bits, those of all models of a replica together."""


def _check_countable(amount: float) -> float:
    if 0.0 < amount < MIN_AMOUNT:
        raise RecipeError(f"{amount:g} is less than Ray counts: give at least {MIN_AMOUNT:g}").of("amount.small")
    return amount


_Countable = AfterValidator(_check_countable)
Amount = Annotated[float, Field(ge=0.0, le=MAX_AMOUNT), _Countable]
PositiveAmount = Annotated[float, Field(gt=0.0, le=MAX_AMOUNT), _Countable]
"""Amounts of a resource that Ray reserves."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""The seeds that torch takes. NumPy takes them modulo 2**64."""


def _read_range(given: object, minimum: int = 1) -> object:
    """Accept one positive number, or two in ascending order, from ``minimum`` up."""
    is_range = isinstance(given, list | tuple)
    numbers: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if (
        # ``isinstance`` would accept a bool, which is an int.
        not all(type(number) is int and number >= minimum for number in numbers)
        or len(numbers) != (2 if is_range else 1)
        or numbers[-1] < 1
        or sorted(numbers) != [*numbers]
    ):
        raise RecipeError(f"expected a number, or [min, max], got {given!r}").of("range.invalid")
    if numbers[-1] > _MAX_COUNT:
        raise RecipeError(f"expected at most {_MAX_COUNT:,}, got {short_repr(given)}").of("range.large")
    return tuple(numbers) if isinstance(given, list) else given


NumberOrRange = Annotated[int | tuple[int, int], BeforeValidator(_read_range)]
NumberOrRangeFromZero = Annotated[int | tuple[int, int], BeforeValidator(partial(_read_range, minimum=0))]


def as_list(given: object) -> object:
    """Return a single name as a list, and any other value unchanged."""
    return [given] if isinstance(given, str) else given


def _check_custom(resources: dict[str, float]) -> dict[str, float]:
    if known := {"CPU", "GPU", "memory", "object_store_memory"} & resources.keys():
        raise RecipeError(f"{known.pop()} is not a custom resource: CPUs and GPUs have keys of their own").of(
            "resources.built_in"
        )
    return resources


CustomResources = Annotated[dict[str, PositiveAmount], AfterValidator(_check_custom)]
"""Amounts by resource name, as declared when nodes start, such as {a10g: 1}. They select the kind of node."""


STORED = {"stored": True}
"""Pydantic's context for the validation of a stored recipe."""


def is_stored(info: ValidationInfo) -> bool:
    """Return True for a stored recipe. Its plan has trained already, perhaps before a rule was added."""
    return info.context == STORED


class Section(BaseModel):
    """A part of the recipe. Unknown keys, wrong types and infinite numbers are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
