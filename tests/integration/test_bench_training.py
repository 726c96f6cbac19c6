"""The benchmark for GPUs, on a CPU with a small model."""

from pathlib import Path

import pytest

from tests.helpers import in_fork, write_sums


@pytest.mark.slow
def test_the_gpu_benchmark_prints_a_row_for_each_recipe(tmp_path: Path) -> None:
    source = f"data.source={write_sums(tmp_path / 'corpus')}"
    small = (source, "train.device=cpu", "train.torch_compile=false", "model.args={layers: 1, width: 32, heads: 2}",
             "data.tokenizer.vocab_size=300", "data.block_length=16", "train.global_batch_size=4",
             "train.plan={micro_batch: 2, activation_checkpointing: true}")  # fmt: skip
    recipes = ("benchmarks/training/gpt_350m.yaml", "benchmarks/training/gpt_1_3b.yaml")
    done = in_fork("benchmarks.training.gpu", *recipes, *small, "--warm-up=1", "--steps=2", processes=1)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("gpt_")]
    assert [row[:2] for row in rows] == [["gpt_350m", "22,080"], ["gpt_1_3b", "22,080"]], done.stderr
    assert all(row[5] != "unknown" for row in rows), "the model's operations were not counted"
