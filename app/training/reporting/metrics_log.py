"""``metrics.jsonl``: one object a step, one an epoch."""

import json
from collections.abc import Callable

from pydantic import BaseModel
from upath import UPath

from app.storage import write_atomically
from app.warnings import Attempts


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in the run's folder."""

    def __init__(self, folder: UPath) -> None:
        self._path = folder / "metrics.jsonl"
        self._pending: list[str] = []
        """Lines that storage has not taken yet."""
        self._may_be_torn = False
        self._writing = Attempts(f"{str(self._path)!r} cannot be written, and waits for the next step")

    def append(self, *records: BaseModel) -> None:
        """Write one line for each record; what storage refuses is written with the next."""
        self._pending += [record.model_dump_json(exclude_none=True) for record in records]
        if self._writing(self._write):
            self._pending = []

    def forget_after(self, step: int) -> None:
        """Drop what is of later steps, which a run that goes on from ``step`` does again; and a torn last line."""
        self._keep(lambda line: _step_of(line) <= step)

    def _write(self) -> None:
        if self._may_be_torn:
            self._keep(lambda line: line not in self._pending)
        self._may_be_torn = True
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._pending)
        self._may_be_torn = False

    def _keep(self, belongs: Callable[[str], bool]) -> None:
        """Leave the whole lines that belong there."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _is_whole(line) and belongs(line)]
        write_atomically(self._path, "".join(f"{line}\n" for line in kept).encode())


def _is_whole(line: str) -> bool:
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])
