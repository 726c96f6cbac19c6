"""A model materialised from a blueprint equals the same model built directly."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from app.artifacts import RECIPE_FILE, WEIGHTS_FILE
from app.config import ModelConfig, dump_recipe, load_recipe
from app.models.blueprint import Blueprint
from app.models.factory import blueprint_of, build_model
from app.models.gpt import GPT
from app.published.weights import read_architecture, read_weights
from app.storage import to_path
from app.tasks import prepare
from app.training.worker import seed_random
from benchmarks.machine import peak_growth
from tests.wording import refused

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
Build = Callable[[], nn.Module]


class Varied(nn.Module):
    """Initialised in all the ways that factories use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.linear.weight
        nn.init.orthogonal_(self.linear.weight)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        self.scale = nn.Parameter(torch.full((3,), 0.5) * torch.rand(3))
        self.table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), requires_grad=False)
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.batch_norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())
        self.register_buffer("steps", self.mask.float().cumsum(0), persistent=False)
        with torch.no_grad():
            self.linear.bias[:3] = torch.linspace(0, 1, 3)
            self.embedding.weight[1].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.scale.is_special = True  # type: ignore[attr-defined]


class Reads(nn.Module):
    """Reads a weight during construction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        with torch.no_grad():
            self.linear.weight /= self.linear.weight.norm().item()


class KeepsATensor(nn.Module):
    """Has a tensor attribute that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), torch.rand(3)


def hugging_face(kind: str, **args: Any) -> nn.Module:
    facts = {"vocab_size": 60, "max_length": 16, "num_labels": 3}
    return build_model(ModelConfig(factory=f"app.models.huggingface:{kind}", args=SMALL | args), facts)


def small_cnn() -> nn.Module:
    return build_model(ModelConfig(factory="app.models.image:small_cnn"), {"num_labels": 10, "channels": 1})


RECORDED = {
    "GPT": partial(GPT, 64, 16, layers=2, width=16, heads=2),
    "GPT with learned positions": partial(GPT, 64, 16, layers=1, width=16, heads=2, positions="learned", tied=False),
    "convolutions": small_cnn,
    "Llama": partial(hugging_face, "causal_lm", model_type="llama"),
    "BERT": partial(hugging_face, "sequence_classifier", model_type="bert"),
    "varied": Varied,
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
}
WHOLE = {"reads a weight": Reads, "keeps a tensor": KeepsATensor, "LSTM": partial(nn.LSTM, 4, 4)}


def content(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("build", (RECORDED | WHOLE).values(), ids=RECORDED | WHOLE)
def test_the_values_are_those_of_a_model_that_is_built_at_once(build: Build) -> None:
    seed_random(7)
    expected = content(build())
    drawn = torch.rand(3)
    seed_random(7)
    made = content(Blueprint.of(build).make())
    assert torch.equal(torch.rand(3), drawn), "the random state differs"
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == expected[name].stride()
        assert tensor.requires_grad == expected[name].requires_grad


@pytest.mark.parametrize("build", RECORDED.values(), ids=RECORDED)
def test_a_blueprint_has_no_memory_and_is_made_one_tensor_at_a_time(build: Build) -> None:
    blueprint = Blueprint.of(build)
    parameters = list(blueprint.model.parameters())
    drawn = [parameter for parameter in parameters if parameter.is_meta]
    assert sum(map(Tensor.numel, drawn)) > 0.9 * sum(map(Tensor.numel, parameters))
    placed: list[nn.Parameter] = []

    def place(parameter: nn.Parameter) -> None:
        assert not parameter.is_meta
        placed.append(parameter)

    model = blueprint.make(finish=Tensor.bfloat16, place=place)
    assert set(map(id, placed)) == set(map(id, model.parameters()))
    assert len(placed) == len(list(model.parameters()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_part_has_the_values_that_it_has_in_the_whole_model() -> None:
    build = RECORDED["GPT"]
    seed_random(7)
    expected = content(build().blocks[1])  # type: ignore[index, arg-type]
    drawn = torch.rand(3)
    seed_random(7)
    blueprint = Blueprint.of(build)
    part: nn.Module = blueprint.model.blocks[1]  # type: ignore[index, assignment]
    blueprint.make(part=part)
    assert torch.equal(torch.rand(3), drawn), "the random state differs"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in content(part).items())
    made = {id(parameter) for parameter in blueprint.model.parameters() if not parameter.is_meta}
    assert made == {id(parameter) for parameter in part.parameters()}


def test_a_parameter_keeps_what_its_factory_noted_and_where_it_is_shared() -> None:
    model = Blueprint.of(Varied).make()
    assert model.tied.weight is model.linear.weight
    assert model.scale.is_special
    assert not hasattr(model.scale, "fake_mode")


class Copies(nn.Module):
    """Leaves some parameters empty and copies others, so that one operation is the last of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.source, self.target = (
            nn.ParameterList(nn.Parameter(torch.empty(4)) for _ in range(20)) for _ in range(3)
        )
        with torch.no_grad():
            for source, target in zip(self.source, self.target, strict=True):
                target.copy_(source.fill_(1.0))


def test_parameters_are_placed_in_the_same_order_in_every_process() -> None:
    placed: list[nn.Parameter] = []
    model = Blueprint.of(Copies).make(place=placed.append)
    pairs = zip(model.target, model.source, strict=True)
    expected = [*model.empty, *(parameter for pair in pairs for parameter in pair)]
    assert list(map(id, placed)) == list(map(id, expected))


@pytest.mark.parametrize("build", (RECORDED | WHOLE).values(), ids=RECORDED | WHOLE)
def test_loaded_weights_are_not_initialised_and_other_buffers_are(build: Build) -> None:
    seed_random(7)
    expected = content(trained := build())
    blueprint = Blueprint.of(build)
    drawn = torch.get_rng_state()
    loaded = content(blueprint.load(trained.state_dict()))
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == expected[name].stride()
        assert tensor.requires_grad == expected[name].requires_grad


def test_loaded_weights_have_the_models_type_and_stay_shared() -> None:
    state = Varied().state_dict()
    del state["tied.weight"]
    blueprint = Blueprint.of(lambda: Varied().half())
    assert blueprint.model.scale.is_meta, "the conversion was not recorded"
    model = blueprint.load(state)
    assert model.tied.weight is model.linear.weight
    assert model.tied.weight.dtype == torch.float16
    assert model.scale.is_special


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, "missing tensors: weight; unknown: none"),
        ({"other": torch.ones(1)}, "missing tensors: none; unknown: other"),
        ({"weight": torch.ones(4, 5)}, r"weight has shape \[4, 5\]: expected \[4, 4\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    values = {name: value for name, value in (nn.Linear(4, 4).state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Blueprint.of(partial(nn.Linear, 4, 4)).load(values)


def test_what_is_wrong_with_a_factory_is_said_as_ever() -> None:
    with pytest.raises(ValueError, match="not divisible"):
        Blueprint.of(partial(GPT, 64, 16, width=10, heads=3))


def test_a_factory_that_loads_weights_is_recorded_without_a_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = nn.Linear(4, 4).state_dict()
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.load_state_dict(safetensors.torch.load_file(tmp_path / "weights.safetensors"))
        return model

    model = Blueprint.of(build).make()
    assert torch.equal(model.weight, weights["weight"])
    assert not caplog.records


def test_one_tensor_is_in_memory_at_a_time() -> None:
    megabytes, layers = 16, 16
    blueprint = Blueprint.of(lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers))))
    with peak_growth() as grown:
        blueprint.make(finish=lambda value: value.new_empty(0))
    assert grown() < 0.5 * layers * megabytes * 2**20


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(5)))


def test_a_weights_folder_is_read_into_memory_once(tmp_path: Path) -> None:
    recipe = load_recipe("recipes/digits.yaml", [f"model.factory={__name__}:wide", "model.args={}"])
    folder, model = to_path(tmp_path), wide()
    size = sum(parameter.nbytes for parameter in model.parameters())
    safetensors.torch.save_file(model.state_dict(), tmp_path / WEIGHTS_FILE)
    (folder / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    prepare(recipe).save_codec(folder)
    read_architecture(tmp_path)  # imports modules
    with peak_growth() as grown:
        read = read_weights(tmp_path).model
    assert grown() < 1.3 * size
    assert all(map(torch.equal, read.parameters(), model.parameters()))
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / WEIGHTS_FILE)
    with refused("weights.other_model"):
        read_weights(tmp_path)


def encoder(layers: int) -> nn.Module:
    """A model whose layers are copies of the first."""
    layer = nn.TransformerEncoderLayer(512, 4, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


DECODER = ModelConfig(factory="app.models.gpt:GPT", args={"width": 512, "heads": 4})
ENCODER = ModelConfig(factory=f"{__name__}:encoder", args={})


@pytest.mark.parametrize("model", [DECODER, ENCODER], ids=["decoder", "encoder"])
@pytest.mark.parametrize(("layers", "device"), [(1, "cpu"), (6, "meta")], ids=["14 MB", "76 MB"])
def test_a_large_model_of_a_recipe_is_recorded_and_a_small_one_is_built(
    layers: int, device: str, model: ModelConfig
) -> None:
    config = model.model_copy(update={"args": {**model.args, "layers": layers}})
    seed_random(1)
    before = torch.get_rng_state()
    blueprint = blueprint_of(config, {"vocab_size": 512, "max_length": 16})
    assert {parameter.device.type for parameter in blueprint.model.parameters()} == {device}
    assert torch.equal(torch.get_rng_state(), before) == (device == "meta")
