"""The recipe of conversations goes on from the GPT of the standard library, as the page on fine-tuning says."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.generating import make_language_model
from tests.helpers import folder_of, rayloom, records_of, result_of, run

CORES, SECONDS = 2, 180
RECIPE = """
name: chats
task: chat
data: {source: chats.jsonl, block_length: 32}
model: {pretrained: base}
train: {epochs: 1, max_steps: 2, global_batch_size: 8, workers: 2}
"""


def train(recipe: str, storage: Path, *overrides: str) -> dict[str, Any]:
    words = ["torchrun", "--nproc-per-node", "2", "-m", "app.training", f"recipes/{recipe}.yaml"]
    done = run(
        *words, f"storage={storage}", *overrides, environment={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def test_a_job_trains_from_a_relative_folder_of_its_project_and_waits_for_no_other(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    make_language_model(tmp_path / "base", length=64)
    turns = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "return a + b"}]
    rows = [{"messages": [{**turn, "content": f"{turn['content']} {row}"} for turn in turns]} for row in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "chats.yaml").write_text(RECIPE, encoding="utf-8")
    done = run("rayloom", "submit", "train", "chats.yaml", environment=cluster, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(done.stdout)["metrics"]["steps"] == 2
    assert "waiting" not in done.stdout + done.stderr
    assert "no job runs or waits" in rayloom("jobs", environment=cluster).stdout


@pytest.mark.slow
def test_the_recipe_of_conversations_learns_within_three_minutes_of_two_cores(tmp_path: Path) -> None:
    storage, gpt = tmp_path / "storage", tmp_path / "stdlib_gpt"
    started_from = train("stdlib_gpt", storage, "train.epochs=1", "train.max_steps=60")
    words = ["export", folder_of(started_from).name, str(gpt), "--for-transformers"]
    exported = run("rayloom", *words, environment={**os.environ, "RAYLOOM_STORAGE": str(storage)})
    assert exported.returncode == 0, exported.stderr
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    chat = train("stdlib_chat", storage, f"model.pretrained={gpt}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Not the time on a clock, in which other work takes part of the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CORES * SECONDS
    perplexities = [record["val_perplexity"] for record in records_of(folder_of(chat)) if "val_perplexity" in record]
    assert len(perplexities) == chat["metrics"]["epochs"] == 2
    assert chat["metrics"]["val_perplexity"] == min(perplexities) < 0.9 * perplexities[0]
