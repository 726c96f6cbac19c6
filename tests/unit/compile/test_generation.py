"""Language models compiled: equal to transformers, within their gates, published with what was measured."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib import request

import numpy as np
import openvino
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from upath import UPath

from app.cli.versions import description_of
from app.compile.generation import compilation, exporter
from app.compile.generation.architectures import ARCHITECTURES
from app.compile.generation.compilation import best_point
from app.compile.generation.export import export_model, load_causal_lm
from app.compile.generation.perplexity import CompiledModel, Losses
from app.compile.generation.records import GenerationReport
from app.compile.generation.timing import GenerationPoint
from app.compile.run import compile_model
from app.compile.timing import Concurrency
from app.config import ObjectiveConfig, load_recipe
from app.data.language import Passage
from app.data.prepared import IGNORED
from app.published.weights import convert_weights
from app.repository.manifest import GENERATION_FILE, Manifest
from app.repository.repository import Repository
from app.runs import Run, execute
from tests.generating import END_ID, LENGTH, TEMPLATE, TEXTS, copy_instead_of_export, make_language_model
from tests.helpers import ROOT, train_alone
from tests.importing import imported
from tests.proxies import listening
from tests.signal_stack import signal_stack
from tests.wording import refused

WORDS = [word for text in TEXTS for word in text.split()]
SMALL: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "sliding_window": LENGTH},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "qwen3": {"head_dim": 16},
}


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of random words, a document each."""
    draw = random.Random(0)
    rows = [json.dumps({"text": " ".join(draw.choices(WORDS, k=40))}) for _ in range(12)]
    file = tmp_path_factory.mktemp("samples") / "texts.jsonl"
    file.write_text("\n".join(rows), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Compiled:
    storage: UPath
    output: str

    @property
    def manifest(self) -> Manifest:
        return Repository(self.storage).manifest("writer", 1)

    @property
    def report(self) -> GenerationReport:
        (run,) = (self.storage / "runs/compile").iterdir()
        return GenerationReport.model_validate_json((run / "report.json").read_bytes())


@pytest.fixture(scope="session")
def compiled(
    language_model: Path, exported_model: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """A small model imported in every precision."""
    storage = tmp_path_factory.mktemp("compiled") / "storage"
    keys = ["compile.precisions=[fp32,int8,int4]", "compile.gates.max_perplexity_rise=0.9"]
    with pytest.MonkeyPatch.context() as patched:
        copy_instead_of_export(patched, exported_model / GENERATION_FILE)
        return Compiled(UPath(storage), imported(storage, "writer", language_model, f"--samples={samples}", *keys))


def test_a_version_says_what_it_generates_and_how_it_was_measured(compiled: Compiled, samples: Path) -> None:
    manifest, generation = compiled.manifest, compiled.manifest.generation
    assert generation is not None
    assert (generation.context_length, generation.end_ids, generation.has_chat) == (LENGTH, (END_ID,), True)
    assert manifest.engine_key.engine == "openvino_genai"
    assert {GENERATION_FILE, "tokenizer.json", "config.json", "chat_template.jinja"} <= set(manifest.files)
    assert generation.perplexity is not None
    assert manifest.score is not None
    assert (manifest.score.value, manifest.score.mode) == (generation.perplexity.value, "min")
    assert (manifest.accuracy_split, manifest.accuracy_rows) == ("samples", 12)
    assert manifest.lineage.imported is not None
    assert manifest.lineage.imported.samples == str(samples)
    assert manifest.serving.max_batch_size == 16
    # Triton has no backend for such a version.
    assert not (compiled.storage / "models/writer/config.pbtxt").exists()
    Repository(compiled.storage).verify("writer", 1)
    lines = "\n".join(description_of(manifest, ["production"], "folder"))
    assert f"generates      {LENGTH} tokens with the prompt, with a chat template" in lines
    assert "16 streams, replicas" in lines
    assert "in float32" in lines
    with refused("triton.engine"):
        Repository(compiled.storage).export_to_triton("writer", 1, UPath(compiled.storage / "elsewhere"))


def test_every_precision_is_measured_and_only_float32_must_give_the_same_tokens(compiled: Compiled) -> None:
    fp32, int8, int4 = compiled.report.variants
    assert fp32.greedy.equal_prompts == fp32.greedy.prompts >= 20
    assert fp32.max_difference < 1e-4
    assert fp32.size_bytes > int8.size_bytes > int4.size_bytes
    assert "in int8, by NNCF's choice" in int4.weights
    assert all(record.perplexity and record.passed for record in (fp32, int8, int4))
    assert fp32.rise is None
    assert int8.rise is not None
    assert {point.streams for point in compiled.report.points} == {1, 16}
    page = next((compiled.storage / "runs/compile").iterdir()) / "report.html"
    for words in (f"equal in {fp32.greedy.prompts} of {fp32.greedy.prompts} prompts", "tokens/s", "by NNCF"):
        assert words in page.read_text(encoding="utf-8")


def test_the_interval_of_a_rise_is_paired_and_covers_the_truth() -> None:
    generator, covered = np.random.default_rng(1), 0
    for _ in range(200):
        tokens = generator.integers(20, 200, 30)
        base = tokens * generator.normal(3.0, 0.5, 30)  # documents differ far more than the variants
        rise = Losses(base + tokens * generator.normal(0.01, 0.01, 30), tokens).rise_over(Losses(base, tokens))
        covered += rise.high >= np.expm1(0.01)
        assert rise.high - rise.value < 0.01
    assert 0.94 <= covered / 200 <= 1.0
    assert Losses(np.array([9.0]), np.array([3])).rise_over(Losses(np.array([9.0]), np.array([3]))).failure(0.5)


@pytest.mark.slow  # tests of compile and of the engine compare GPT-NeoX and Llama
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_architecture_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    if kind not in ("gpt2", "gpt_neox", "opt"):
        shape |= {"num_key_value_heads": 2}
    inner = {} if kind in ("gpt2", "opt") else {"intermediate_size": 64}
    config = AutoConfig.for_model(kind, vocab_size=300, **{**shape, **inner, **SMALL.get(kind, {})})
    if kind == "mistral":
        config.sliding_window = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    export_model(model, tmp_path)
    exported = CompiledModel(tmp_path / GENERATION_FILE, 1)
    for length in (1, 5, LENGTH):
        tokens = np.random.default_rng(length).integers(1, 300, (2, length))
        with torch.no_grad():
            expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
        assert np.abs(exported.logits(tokens) - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


def test_an_export_sends_no_usage_data(language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, OpenVINO's converter would send some."""
    monkeypatch.setattr(request, "_opener", None)  # it keeps the proxies of an earlier request
    with listening(403) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        export_model(load_causal_lm(language_model), tmp_path)
        assert proxy.lines == []


def matrices_in(graph: openvino.Model) -> list[openvino.op.Constant]:
    return [node for node in graph.get_ops() if node.get_type_name() == "Constant" and len(node.shape) == 2]


def export_with(monkeypatch: pytest.MonkeyPatch, exported: Path, rows: slice, factor: float) -> None:
    """Have the export write a graph whose output layer has other rows than the model's."""

    def export(model: Any, folder: Path) -> None:
        graph, weight = openvino.Core().read_model(exported / GENERATION_FILE), model.get_output_embeddings().weight
        (layer,) = [matrix for matrix in matrices_in(graph) if np.array_equal(matrix.data, weight.detach().numpy())]
        other = layer.data.copy()
        other[rows] *= factor
        layer.output(0).replace(openvino.op.Constant(other).output(0))
        openvino.save_model(graph, folder / GENERATION_FILE, compress_to_fp16=False)

    monkeypatch.setattr(exporter, "export_model", export)


def test_a_graph_with_another_weight_is_not_published(
    language_model: Path, exported_model: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_with(monkeypatch, exported_model, slice(7, 8), 3.0)
    folder = tmp_path / "model"
    shutil.copytree(language_model, folder)
    (folder / "chat_template.jinja").unlink()
    told = imported(tmp_path, "writer", folder, f"--samples={samples}", succeeds=False)
    assert "has no chat template, so it answers no chats: add chat_template.jinja to the folder" in told
    assert "the exported gpt_neox is not the model of transformers: its greedy tokens differ (prompt " in told
    assert not Repository(UPath(tmp_path)).names()
    (run,) = (UPath(tmp_path) / "runs/compile").iterdir()
    assert "nothing published" in (run / "report.html").read_text(encoding="utf-8")


def test_a_graph_with_the_same_tokens_and_other_probabilities_is_not_published(
    language_model: Path, exported_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_with(monkeypatch, exported_model, slice(None), 1.5)
    told = imported(tmp_path, "writer", language_model, succeeds=False)
    assert "the exported gpt_neox is not the model of transformers: its logits differ by up to " in told
    assert not Repository(UPath(tmp_path)).names()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a small GPT that was trained on words, with a test split."""
    storage = tmp_path_factory.mktemp("trained")
    draw = random.Random(1)
    (storage / "texts").mkdir()
    for number in range(60):
        text = " ".join(draw.choices(WORDS, k=80)) + f" {number}"
        (storage / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    train_alone(*keys_of(storage), recipe=STDLIB)
    return storage


CHAT = str(ROOT / "recipes/stdlib_chat.yaml")
STDLIB = str(ROOT / "recipes/stdlib_gpt.yaml")


def keys_of(storage: Path) -> list[str]:
    model = "model.args={layers: 1, width: 32, heads: 2, positions: rotary, tied: true}"
    data = [f"data.source={storage / 'texts'}", "data.block_length=32", "data.tokenizer.vocab_size=300"]
    splits = ["data.validation_fraction=0.2", "data.test_fraction=0.2"]
    return [f"storage={storage}", model, *data, *splits, "train.max_steps=8", "train.workers=1", "tune=null"]


@dataclass(frozen=True)
class Published:
    manifest: Manifest
    graph: Path


@pytest.fixture(scope="session")
def published(trained: Path) -> Published:
    """The trained model in float32."""
    recipe = load_recipe(STDLIB, [*keys_of(trained), "compile.precisions=[fp32]"])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    assert result.artifacts["model"] == f"{recipe.name}/1"
    repository = Repository(UPath(trained))
    folder = Path(str(repository.folder(recipe.name, 1)))
    return Published(repository.manifest(recipe.name, 1), folder / GENERATION_FILE)


def test_a_trained_model_is_published_with_the_perplexity_of_its_test_split(published: Published) -> None:
    manifest = published.manifest
    assert manifest.task == "language-modeling"
    assert manifest.accuracy_split == "test"
    assert manifest.generation is not None
    assert manifest.generation.perplexity == manifest.generation.baseline_perplexity
    assert manifest.generation.perplexity is not None
    assert 1.0 < manifest.generation.perplexity.value < 300.0
    assert manifest.generation.perplexity.standard_error
    assert manifest.lineage.train_run is not None
    assert (manifest.generation.has_chat, manifest.generation.context_length) == (False, 32)


def test_perplexity_is_that_of_transformers(published: Published, trained: Path, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 250, (3, 33))
    targets = tokens[:, 1:].copy()
    targets[0, :24] = IGNORED
    passages = [
        Passage(row[: 32 - 5 * number], target[: 32 - 5 * number], np.full(32 - 5 * number, number))
        for number, (row, target) in enumerate(zip(tokens[:, :-1], targets, strict=True))
    ]
    stack = signal_stack()
    compiled = CompiledModel(published.graph, 1)
    assert signal_stack() == stack, "whoever frees the model would free this thread's stack"
    losses = compiled.losses(passages)
    model = load_causal_lm(convert(weights_in(trained), tmp_path))
    for passage, loss, count in zip(passages, losses.sums, losses.tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(passage.tokens[None])).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(passage.targets), reduction="sum")
        assert loss == pytest.approx(float(expected), rel=1e-5)
        assert count == np.count_nonzero(passage.targets != IGNORED)


def test_a_perplexity_claims_no_error_of_one_document_and_needs_a_target(published: Published) -> None:
    one = Losses(np.array([9.0]), np.array([3])).perplexity
    assert one.standard_error is None
    assert str(one) == "20.086 on 3 tokens"
    assert " ± " in str(Losses(np.array([9.0, 7.0]), np.array([3, 3])).perplexity)
    nothing = Passage(np.arange(1, 5), np.full(4, IGNORED), np.zeros(4, np.int64))
    with refused("generation.no_targets"):
        CompiledModel(published.graph, 1).losses([nothing])


def test_weights_that_raise_the_perplexity_are_not_published(
    trained: Path, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_instead_of_export(monkeypatch, published.graph)
    compress = exporter.compress_weights

    def compress_another(graph: Path, folder: Path, precision: Any) -> str:
        """Write the weights of a model with the same sizes that has learned nothing."""
        model, draw = openvino.Core().read_model(graph), np.random.default_rng(0)
        for matrix in matrices_in(model):
            random = draw.normal(scale=0.5, size=matrix.shape).astype(np.float32)
            matrix.output(0).replace(openvino.op.Constant(random).output(0))
        openvino.save_model(model, tmp_path / graph.name, compress_to_fp16=False)
        return compress(tmp_path / graph.name, folder, precision)

    monkeypatch.setattr(exporter, "compress_weights", compress_another)
    keys = ["name=other", f"compile.weights={weights_in(trained)}", "compile.precisions=[int8]"]
    result = execute(Run.start("compile", load_recipe(STDLIB, [*keys_of(trained), *keys])), compile_model)
    assert result.error is not None
    assert "int8: perplexity rises by" in result.error
    assert "compile.gates.max_perplexity_rise is 1.00%" in result.error
    assert "other" not in Repository(UPath(trained)).names()


def convert(weights: Path, folder: Path) -> Path:
    convert_weights(weights, UPath(folder))
    return folder


@pytest.mark.parametrize(
    ("override", "rule", "key"),
    [
        ("compile.gates.min_score=1.5 compile.precisions=[fp32]", "gate.min_score", "compile.gates.min_score"),
        ("compile.gates.above_baseline=true", "gate.above_baseline", "compile.gates.above_baseline"),
        ("compile.precisions=[bf16]", "generation.precision", "compile.precisions"),
        ("compile.precisions=[int4] compile.engines=[vllm]", "generation.precision", "compile.precisions"),
        ("compile.engines=[openvino]", "generation.engine", "compile.engines"),
        ("compile.engines=[vllm,openvino_genai]", "generation.engine", "compile.engines"),
        ("compile.engines=[vllm]", "vllm.python", "RAYLOOM_VLLM_PYTHON"),
        ("compile.gpus=1", "generation.key", "compile.gpus"),
        ("compile.batch_sizes=[1]", "generation.key", "compile.batch_sizes"),
    ],
)
def test_a_gate_or_a_key_that_does_not_fit_publishes_nothing(
    trained: Path, published: Published, override: str, rule: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_instead_of_export(monkeypatch, published.graph)
    before = Repository(UPath(trained)).names()
    recipe = load_recipe(
        STDLIB, [*keys_of(trained), "name=other", f"compile.weights={weights_in(trained)}", *override.split()]
    )
    if rule != "gate.min_score":
        with refused(rule, key):
            compile_model(Run.start("compile", recipe))
    else:
        result = execute(Run.start("compile", recipe), compile_model)
        assert result.error is not None
        assert "compile.gates.min_score is 1.5, and fp32 has perplexity" in result.error
    assert Repository(UPath(trained)).names() == before


def weights_in(storage: Path) -> Path:
    return next((storage / "runs/train").iterdir()) / "weights"


def test_a_chat_model_with_an_adapter_is_published_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed in two settings, as outside tests. Its template has another end token (open-r1#603)."""
    monkeypatch.setitem(compilation._SETTINGS, "cpu", 2)
    pretrained = make_language_model(tmp_path / "pretrained", "llama")
    tokenizer = Tokenizer.from_file(str(pretrained / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("~", special=True)])
    tokenizer.save(str(pretrained / "tokenizer.json"))
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("<|endoftext|>", "~"), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": f"{one} {two}"}, {"role": "assistant", "content": two}]}
        for one in WORDS
        for two in WORDS[:8]
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    keys = [
        f"storage={tmp_path / 'storage'}",
        f"model.pretrained={pretrained}",
        "model.adapter={lora: {rank: 4, alpha: 64}}",
        f"data={{source: {tmp_path / 'chats.jsonl'}, block_length: 64, test_fraction: 0.1}}",
        f"data.chat.template={tmp_path / 'own.jinja'}",
        *("train.max_steps=6", "train.optimizer.lr=0.05", "train.workers=1", "compile.precisions=[fp32]"),
    ]
    train_alone(*keys, recipe=CHAT)
    result = execute(Run.start("compile", load_recipe(CHAT, keys)), compile_model)
    assert result.status == "succeeded", result.error
    manifest = Repository(UPath(tmp_path / "storage")).manifest("stdlib_chat", 1)
    assert (manifest.task, manifest.accuracy_split) == ("chat", "test")
    assert manifest.generation is not None
    assert manifest.generation.has_chat
    assert manifest.generation.end_ids == (END_ID, tokenizer.token_to_id("~"))
    assert manifest.generation.greedy.equal_prompts == manifest.generation.greedy.prompts
    tokens = np.arange(1, 20)[None]
    published = CompiledModel(Path(tmp_path / f"storage/models/stdlib_chat/1/{GENERATION_FILE}"), 1).logits(tokens)
    with torch.no_grad():
        base = load_causal_lm(pretrained)(torch.tensor(tokens)).logits.numpy()
    assert np.abs(published - base).max() > 0.01  # it is not the base


def point(precision: str, streams: int, tokens_per_s: float, token_p95_ms: float = 1.0) -> GenerationPoint:
    return GenerationPoint(
        precision=precision,
        concurrency=Concurrency(1, 1),
        streams=streams,
        tokens_per_s=tokens_per_s,
        first_token_ms=1.0,
        token_p95_ms=token_p95_ms,
    )


def test_the_objective_chooses_by_one_stream_or_by_sixteen() -> None:
    points = [point("fp32", 1, 90), point("fp32", 16, 500), point("int8", 1, 80), point("int8", 16, 900, 9.0)]
    assert best_point(points, ObjectiveConfig()).precision == "fp32"
    assert best_point(points, ObjectiveConfig(goal="max_throughput")).precision == "int8"
    assert best_point(points, ObjectiveConfig(goal="max_throughput", latency_ms=5.0)).precision == "fp32"
    with refused("objective.unreachable", "compile.objective.latency_ms"):
        best_point(points, ObjectiveConfig(goal="max_throughput", latency_ms=0.5))
