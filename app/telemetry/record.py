"""What training reports, as those who look on see it."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """One line of ``metrics.jsonl``; NaN and Infinity stand in it as Python's ``json`` writes and reads them."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    kind: ClassVar[Literal["step", "epoch"]]
    """What it is of, and what has ended with it."""
    step: int
    epoch: int

    def scalars(self) -> dict[str, float]:
        """The numbers in it, by their keys, such as ``loss`` and ``memory.peak_bytes``."""
        return dict(_scalars("", self.model_dump()))


def _scalars(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}{name}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
