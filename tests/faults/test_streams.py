"""A run on a stream is killed in the middle of a micro-epoch, and trains on each message once all the same."""

import os
import signal
from pathlib import Path

import pytest

from tests.helpers import folder_of, steps_of, wait_until
from tests.launch import Launch, Launched, newest_step
from tests.streams import (
    document,
    language_overrides,
    left_out,
    message,
    micro_epochs_of,
    overrides,
    published,
    times_trained,
)
from tests.tables import Faults

MESSAGES = 500


@pytest.mark.parametrize("kind", ["nats", "kafka"])
def test_killed_in_a_micro_epoch_then_on_with_other_processes(
    launch: Launch, tmp_path: Path, faults: Faults, kind: str
) -> None:
    storage = tmp_path / "storage"

    def start(name: str, processes: int = 1) -> Launched:
        keeping = ["train.resume=latest", "train.checkpoint.every_steps=2", "train.checkpoint.background=false"]
        keys = [*overrides(source, storage, pause_s=0.3), *keeping, f"name={name}"]
        arguments = ["-m", "app.training", "recipes/reviews.yaml", *keys]
        return launch.torchrun(*arguments, processes=processes) if processes > 1 else launch("python", *arguments)

    told = f"{kind}: SIGKILL in micro-epochs, on with 1, then 2 processes"
    with (
        published(kind, tmp_path / "jetstream", map(message, range(MESSAGES))) as source,
        faults("T15", told, "each message once; the same bits until 2") as fault,
    ):
        killed = []
        for _ in range(2):
            run = start("parts")
            aim = newest_step(storage, "parts") + 8
            wait_until(lambda aim=aim: newest_step(storage, "parts") >= aim, timeout_s=300)
            os.kill(run.pid, signal.SIGKILL)
            run.ends()
            killed.append(newest_step(storage, "parts"))
        parts = start("parts", processes=2).result()
        times = times_trained(folder_of(parts), range(MESSAGES))
        fault.saw(f"killed after steps {killed}; {times.count(1.0)} of {MESSAGES} messages once, {sorted(set(times))}")
        assert parts["metrics"]["resumed_from_step"] == killed[-1]
        assert set(times) == {0.0, 1.0}
        assert times.count(0.0) == left_out(folder_of(parts), MESSAGES)
        if kind == "kafka":  # it gives the messages of several partitions in any order
            return
        whole = start("whole").result()
        steps, reference = steps_of(folder_of(parts)), steps_of(folder_of(whole))
        assert [record["loss"] for record in steps[: killed[-1]]] == [
            record["loss"] for record in reference[: killed[-1]]
        ]
        assert [record["loss"] for record in steps] == pytest.approx([record["loss"] for record in reference], abs=1e-5)
        assert times_trained(folder_of(whole), range(MESSAGES)) == times


def test_a_language_model_is_killed_in_a_micro_epoch(launch: Launch, tmp_path: Path, faults: Faults) -> None:
    storage = tmp_path / "storage"

    def start(name: str, processes: int = 1) -> Launched:
        keeping = ["train.resume=latest", "train.checkpoint.every_steps=1", "train.checkpoint.background=false"]
        model = ["model.factory=tests.faults.models:slow_gpt", "model.args={pause_s: 0.3}", "train.workers=1"]
        keys = [*language_overrides(source, storage), *keeping, *model, f"name={name}", "train.epochs=4"]
        arguments = ["-m", "app.training", "recipes/stdlib_gpt.yaml", *keys]
        return launch.torchrun(*arguments, processes=processes) if processes > 1 else launch("python", *arguments)

    with (
        published("nats", tmp_path / "jetstream", map(document, range(400))) as source,
        faults("T15", "SIGKILL in a micro-epoch of documents, on with 2 processes", "the same losses") as fault,
    ):
        run = start("parts")
        wait_until(lambda: newest_step(storage, "parts") >= 3, timeout_s=300)
        os.kill(run.pid, signal.SIGKILL)
        run.ends()
        killed = newest_step(storage, "parts")
        parts, whole = start("parts", processes=2).result(), start("whole").result()
        found, expected = ([one["loss"] for one in steps_of(folder_of(done))] for done in (parts, whole))
        fault.saw(f"killed after step {killed} of {len(expected)}")
        assert found[:killed] == expected[:killed]
        assert found == pytest.approx(expected, abs=1e-5)
        ranges = [(one.start, one.stop, one.rows) for one in micro_epochs_of(folder_of(parts))]
        assert ranges == [(one.start, one.stop, one.rows) for one in micro_epochs_of(folder_of(whole))]
        assert [start for start, _, _ in ranges] == [{0: 1}, *(stop for _, stop, _ in ranges[:-1])]
