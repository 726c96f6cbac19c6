"""Speculation in compile: measured beside plain generation, and published only if it is equal and faster."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from app.cli.versions import description_of
from app.compile.generation import compilation
from app.compile.generation.agreement import Parity, first_difference, greedy
from app.compile.generation.compilation import best_point
from app.compile.generation.export import load_causal_lm
from app.compile.generation.records import GenerationReport
from app.compile.generation.timing import TimedWork
from app.compile.generation.variants import require_rows
from app.config import ObjectiveConfig, ServeConfig, load_recipe
from app.engines.generation.base import GenerationEngine, PromptLookup
from app.repository.manifest import GENERATION_FILE, Manifest
from app.repository.repository import Repository
from app.serving.config import GeneratorConfig
from tests.generating import copy_instead_of_export, export_language_model, make_language_model
from tests.helpers import ROOT
from tests.importing import imported
from tests.wording import refused

_KEYS = ("compile.precisions=[fp32]", "compile.speculation=prompt_lookup")


def test_logits_that_are_not_finite_fail_parity() -> None:
    logits = np.ones((2, 3), np.float32)
    assert not Parity.of([(logits, logits)]).failure
    assert Parity.of([(logits, logits), (np.full_like(logits, np.nan), logits)]).failure


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token is always the last one again."""
    folder = make_language_model(tmp_path_factory.mktemp("repeating"), "llama")
    model = load_causal_lm(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _exported_once(repeating: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    exported = export_language_model(repeating, tmp_path_factory.mktemp("exported"))
    with pytest.MonkeyPatch.context() as patched:
        copy_instead_of_export(patched, exported / GENERATION_FILE)
        yield


def _manifest(storage: Path) -> Manifest:
    return Repository(UPath(storage)).manifest("writer", 1)


def _report(storage: Path) -> GenerationReport:
    (run,) = (UPath(storage) / "runs/compile").iterdir()
    return GenerationReport.model_validate_json((run / "report.json").read_bytes())


def test_the_fastest_is_published_and_served_as_it_was_measured(repeating: Path, tmp_path: Path) -> None:
    output = imported(tmp_path, "writer", repeating, *_KEYS)
    manifest, report = _manifest(tmp_path), _report(tmp_path)
    plain, looked_up = report.variants
    assert (plain.title, looked_up.title) == ("fp32", "fp32 with prompt lookup of 4")
    assert looked_up.passed
    assert {(point.title, point.streams) for point in report.points} == {
        (record.title, streams) for record in report.variants for streams in (1, 16)
    }
    assert best_point(report.points, ObjectiveConfig()) == report.point
    # It gives five tokens in a step.
    assert report.point
    assert report.point.title == looked_up.title
    assert manifest.generation
    assert manifest.generation.speculation == PromptLookup()
    config = GeneratorConfig.of(str(tmp_path), manifest, ServeConfig())
    assert config.settings(manifest).speculation == PromptLookup()
    assert "speculation    prompt lookup of 4" in "\n".join(description_of(manifest, [], "folder"))
    assert "fp32 with prompt lookup of 4, 1 stream" in output


def test_a_variant_that_gives_other_tokens_is_refused(
    repeating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def other(engine: GenerationEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        answers = await greedy(engine, prompts, num_tokens)
        if engine._settings.speculation:  # type: ignore[attr-defined] # of the engine, to break one of the variants
            answers[2][5] += 1
        return answers

    monkeypatch.setattr(compilation, "greedy", other)
    imported(tmp_path, "writer", repeating, *_KEYS)
    plain, looked_up = _report(tmp_path).variants
    assert plain.passed
    (reason,) = looked_up.reasons
    assert reason.startswith("its greedy tokens differ from those without speculation (prompt 3 of 32, token 6: ")
    generation = _manifest(tmp_path).generation
    assert generation
    assert generation.speculation is None


def test_the_first_difference_is_named() -> None:
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "prompt 2 of 2, token 2: 5 instead of 4"


def test_each_round_is_timed_on_the_next_prompts() -> None:
    work = TimedWork([(0,), (1,), (2,)], num_tokens=8)
    assert [work.prompts_of(number, 2) for number in range(2)] == [[(0,), (1,)], [(2,), (0,)]]


def test_other_models_do_not_speculate() -> None:
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), ["compile.speculation=prompt_lookup"])
    with refused("generation.key", "compile.speculation"):
        require_rows(recipe)
