"""Every plan trains the model that one process of plain PyTorch trains, and goes on from any other plan's state."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers import Tables, run
from tests.parity.plans import rows_of


def launch(processes: int, *arguments: str) -> dict[str, dict[str, list[float]]]:
    done = run(
        *("torchrun", f"--nproc-per-node={processes}", "-m", "tests.parity.worker", *arguments),
        environment={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, dict[str, list[float]]] = json.loads(lines[0].removeprefix("LOSSES "))
    return found


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where a loss is not a number."""
    if not all(map(math.isfinite, losses)):
        return math.inf
    return max(abs(loss - other) / other for loss, other in zip(losses, expected, strict=True))


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_every_plan_trains_the_same_model(processes: int, tmp_path: Path, tables: Tables) -> None:
    found = launch(processes, "table", str(tmp_path))
    rows = rows_of(processes)
    apart = {name: difference(losses["plan"], losses["plain"]) for name, losses in found.items()}
    tables.add(
        f"losses of 10 steps against one process of plain PyTorch, {processes} processes",
        ("plan", "largest relative difference", "allowed"),
        [(name, f"{apart[name]:.1e}", f"{rows[name].tolerance:.0e}") for name in apart],
    )
    assert apart.keys() == rows.keys()
    for name, losses in found.items():
        assert losses["plain"][-1] < 0.9 * losses["plain"][0], "nothing was learned, so nothing was compared"
        assert apart[name] <= rows[name].tolerance, name


SAVED = ["ZeRO 0, sgd", "ZeRO 3, sgd", "pipeline 2, sgd", "ZeRO 1, adamw", "ZeRO 3, adamw", "ZeRO 1, bf16, adamw",
         "tensor 2, adamw", "pipeline 2, adamw"]  # fmt: skip
LOADED = ["ZeRO 1, sgd", "ZeRO 1, adamw", "ZeRO 3, adamw", "tensor 2, adamw", "pipeline 2, adamw"]


def test_a_run_goes_on_under_any_plan_on_any_number_of_processes(tmp_path: Path, tables: Tables) -> None:
    gpt = [name for name in SAVED if not name.startswith("Llama")]
    saved = launch(2, "save", str(tmp_path), *gpt) | launch(
        8, "save", str(tmp_path), "pipeline 2 x tensor 2 x data 2, adamw"
    )
    expected = {slug: losses for each in saved.values() for slug, losses in each.items()}
    table = []
    for processes, wanted in ((1, ["one process, sgd", "one process, adamw"]), (2, LOADED)):
        for name, found in launch(processes, "load", str(tmp_path), *wanted).items():
            for slug, losses in found.items():
                apart = difference(losses, expected[slug])
                table.append((slug.replace("_", " "), name, f"{apart:.1e}"))
                if slug == rows_of(processes)[name].slug:
                    assert losses == expected[slug], f"{name} on {name} is not the same to the bit"
                assert apart <= (1e-3 if "bf16" in slug else 1e-6), f"{slug} -> {name}"
    tables.add("losses of 5 steps after going on under another plan", ("state of", "goes on as", "difference"), table)
