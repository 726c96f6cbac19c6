"""Every plan trains the model that one process of plain PyTorch trains, and goes on from any other plan's state."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import run
from tests.parity.plans import HALF, KEPT, PLANS, STEPS, rows_of
from tests.tables import Tables

Losses = dict[str, dict[str, list[float]]]
"""By row, then by whose they are."""


def launch(processes: int, *arguments: str) -> Losses:
    done = run(
        *("python", "-m", "tests.parity.worker", str(processes), *arguments),
        environment={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert lines, done.stdout + done.stderr
    found: Losses = json.loads(lines[0].removeprefix("LOSSES "))
    return found


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where a loss is not a number."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))


@dataclass(frozen=True)
class Trained:
    """What every row of the table came to, and the folder with the states that were kept."""

    losses: dict[int, Losses]
    """By the number of processes."""
    folder: Path

    def second_half(self) -> dict[str, list[float]]:
        """The losses that each kept state went on to, by its folder's name."""
        rows = {processes: rows_of(processes) for processes in PLANS}
        return {
            rows[processes][name].slug: each["plan"][HALF:STEPS]
            for processes, found in self.losses.items()
            for name, each in found.items()
            if rows[processes][name].is_kept
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("states")
    return Trained({processes: launch(processes, "compare", str(folder)) for processes in PLANS}, folder)


@pytest.mark.parametrize("processes", PLANS)
def test_every_plan_trains_the_same_model(processes: int, trained: Trained, tables: Tables) -> None:
    found, rows = trained.losses[processes], rows_of(processes)
    apart = {name: difference(losses["plan"], losses["plain"]) for name, losses in found.items()}
    tables.add(
        f"losses of {STEPS} steps against one process of plain PyTorch, {processes} processes",
        ("plan", "largest relative difference", "allowed"),
        [(name, f"{apart[name]:.1e}", f"{rows[name].tolerance:.0e}") for name in apart],
    )
    assert apart.keys() == rows.keys()
    for name, losses in found.items():
        assert losses["plain"][-1] < 0.9 * losses["plain"][0], "nothing was learned, so nothing was compared"
        assert apart[name] <= rows[name].tolerance, name


GOES_ON = {
    1: ["one process, sgd", "one process, adamw"],
    2: ["ZeRO 1, sgd", "ZeRO 1, adamw", "ZeRO 3, adamw", "tensor 2, adamw", "pipeline 2, adamw"],
}


def test_a_run_goes_on_under_any_plan_on_any_number_of_processes(trained: Trained, tables: Tables) -> None:
    expected, table = trained.second_half(), []
    assert len(expected) == len(KEPT)
    for processes, wanted in GOES_ON.items():
        for name, found in launch(processes, "go-on", str(trained.folder), *wanted).items():
            for slug, losses in found.items():
                apart = difference(losses, expected[slug])
                table.append((slug.replace("_", " "), name, f"{apart:.1e}"))
                if slug == rows_of(processes)[name].slug:
                    assert losses == expected[slug], f"{name} on {name} is not the same to the bit"
                assert apart <= (1e-3 if "bf16" in slug else 1e-6), f"{slug} -> {name}"
    tables.add(
        f"losses of {STEPS - HALF} steps after going on under another plan",
        ("state of", "goes on as", "difference"),
        table,
    )
