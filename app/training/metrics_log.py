"""``metrics.jsonl``: one object a step, one an epoch."""

from pydantic import BaseModel
from upath import UPath


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in the run's folder."""

    def __init__(self, folder: UPath) -> None:
        self._path = folder / "metrics.jsonl"

    def append(self, *records: BaseModel) -> None:
        """Write one line for each record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{record.model_dump_json()}\n" for record in records)
