"""The benchmark of language models, once in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.generation.churn import Churn
from benchmarks.generation.material import NEW_TOKENS, VOCABULARY, Material, prompts
from tests.helpers import ROOT


def test_prompts_repeat_and_are_within_the_vocabulary() -> None:
    first, again = prompts(3), prompts(5)
    assert first.tolist() == again[:3].tolist()
    assert first.min() > 0
    assert first.max() < VOCABULARY


def test_memory_is_flat_if_it_grows_in_the_first_minute_only() -> None:
    flat = [*range(0, 60 * 10**6, 10**6), *[60 * 10**6] * 240]
    growing = [10**8 + 10**5 * second for second in range(300)]
    goals = list(Churn(300, 9, 4, 0, flat, growing, [0.1, 1.2]).goals)
    assert [goal.verdict for goal in goals] == ["reached", "reached", "**missed**", "**missed**"]


@pytest.mark.slow
def test_contenders_generate_the_same_greedy_tokens(tmp_path: Path) -> None:
    from benchmarks.generation.material import make_material

    material = make_material(tmp_path / "material")
    answers = {
        name: _answers(name, material) for name in ("bare fp32", "transformers", "llama.cpp f32", "rayloom fp32")
    }
    assert answers["bare fp32"] == answers["transformers"]
    assert len(answers["bare fp32"][0]) == NEW_TOKENS
    assert answers["rayloom fp32"][0]  # text
    # It streams no ids for tokens that end within a character, so only the first ones are compared.
    assert answers["llama.cpp f32"][0][:4] == answers["transformers"][0][:4]


def _answers(name: str, material: Material) -> list[list[int]]:
    command = [sys.executable, "-m", "benchmarks.generation.worker", name, str(material.folder)]
    done = subprocess.run(command, input="1\n", capture_output=True, text=True, check=True, cwd=ROOT)
    ready, line = done.stdout.splitlines()
    assert ready == "ready"
    result = json.loads(line)
    assert result["tokens"] == NEW_TOKENS
    assert result["cpu_s"] > 0
    answers: list[list[int]] = result["answers"]
    return answers
