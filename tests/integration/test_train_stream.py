"""Training on a stream: each message once, for any number of workers."""

import re
from pathlib import Path
from typing import Any

import pytest

from app.config import dump_recipe
from app.data.examples import Reason
from tests.helpers import folder_of, in_fork, losses, result_of, train_alone
from tests.streams import left_out, message, micro_epochs_of, nats_server, overrides, times_trained
from tests.unit.data.test_stream_tasks import message as content_of_row
from tests.unit.data.test_stream_tasks import of_task

pytestmark = pytest.mark.slow
RECIPE = "recipes/reviews.yaml"


def test_two_processes_learn_what_one_does_from_a_stream_each_message_once(tmp_path: Path) -> None:
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(message, range(300)))
        runs = [
            train_alone(*overrides(f"{server.url}/S", tmp_path / str(count)), processes=count, recipe=RECIPE)
            for count in (1, 2)
        ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-5)
    for result in runs:
        times = times_trained(folder_of(result), range(300))
        assert set(times) == {0.0, 1.0}
        assert times.count(0.0) == left_out(folder_of(result), 300)
        assert result["metrics"]["steps"] == times.count(1.0) // 16


@pytest.mark.parametrize(
    ("task", "bad", "reason"),
    [
        ("tabular-regression", {"age": 1e300}, "malformed"),  # far out of the scale of the first micro-epoch
        ("image-classification", {"photo": b"torn"}, "unreadable"),
    ],
)
def test_two_processes_learn_what_one_does_from_rows_of_any_task(
    tmp_path: Path, task: str, bad: dict[str, Any], reason: Reason
) -> None:
    streamed = of_task(task)
    rows = streamed.rows()
    rows[150] |= bad
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(content_of_row, rows))
        recipe = streamed.recipe(tmp_path, f"{server.url}/S", **streamed.stream | {"samples": 32, "max_bad": 0.02})
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        keys, path = ["train.epochs=9", "train.early_stopping=null"], str(tmp_path / "recipe.yaml")
        runs = [
            train_alone(*keys, f"storage={tmp_path / str(count)}", processes=count, recipe=path) for count in (1, 2)
        ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), abs=1e-5)
    for result in runs:
        micro_epochs = micro_epochs_of(folder_of(result))
        assert result["metrics"]["epochs"] == len(micro_epochs) > 3
        assert micro_epochs[-1].report.dropped[reason] == 1


def test_a_micro_epoch_with_few_records_of_the_same_fields_trains_on_the_others(tmp_path: Path) -> None:
    streamed = of_task("multimodal-classification")
    rows = streamed.rows()
    for row in rows[100:104]:
        del row["photo"]
    for number, row in enumerate(rows[150:]):
        for field in (["photo"], ["title"], [])[number % 3]:
            del row[field]
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(content_of_row, rows))
        recipe = streamed.recipe(tmp_path, f"{server.url}/S", **streamed.stream | {"samples": 32})
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        keys = ["train.epochs=9", "train.early_stopping=null", "train.resume=latest"]
        done = in_fork("app.training", str(tmp_path / "recipe.yaml"), *keys, processes=1, timeout=300)
    assert done.returncode == 0, done.stderr
    result = result_of(done.stdout)
    left = [int(count) for count in re.findall(r"micro-epoch \d+: (\d+) of its samples fill no batch", done.stderr)]
    given = micro_epochs_of(folder_of(result))[-1].total_rows
    assert 16 in left
    assert 32 in left  # no batch at all
    assert result["metrics"]["steps"] * 16 + sum(left) == given
