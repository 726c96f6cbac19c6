"""``metrics.jsonl``: one object a step, one an epoch."""

import json

from pydantic import BaseModel
from upath import UPath

from app.storage import write_atomically


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in the run's folder."""

    def __init__(self, folder: UPath) -> None:
        self._path = folder / "metrics.jsonl"

    def append(self, *records: BaseModel) -> None:
        """Write one line for each record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{record.model_dump_json(exclude_none=True)}\n" for record in records)

    def forget_after(self, step: int) -> None:
        """Drop what is of later steps, which a run that goes on from ``step`` does again; and a torn last line."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
        write_atomically(self._path, "".join(f"{line}\n" for line in kept).encode())


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return None
