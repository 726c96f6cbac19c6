"""Counted operations against formulas, peaks against data sheets."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.config import TrainConfig
from app.models.precision import allow_tf32
from app.telemetry.mfu import flops_per_sample, gpu_peak_flops, peak_flops, utilisation
from app.telemetry.record import memory_record
from app.training.data.feed import MicroBatch
from app.training.reporting.meter import Meter
from app.training.worker import Worker

LAYERS, HEADS, HEAD_SIZE, TOKENS, VOCABULARY = 3, 4, 8, 16, 50
WIDTH = HEADS * HEAD_SIZE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_in, self.attention_out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.attention_in(hidden).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def test_a_layer_takes_six_operations_a_weight() -> None:
    assert flops_per_sample(nn.Linear(30, 70), {"input": torch.zeros(8, 30)}) == 6 * 30 * 70


def test_a_decoder_takes_what_the_formula_says() -> None:
    model = Decoder()
    multiplied = sum(parameter.numel() for name, parameter in model.named_parameters() if "embedding" not in name)
    expected = TOKENS * (6 * multiplied + 12 * LAYERS * HEADS * HEAD_SIZE * TOKENS)
    assert flops_per_sample(model, {"ids": torch.zeros(2, TOKENS, dtype=torch.int64)}) == expected


@pytest.mark.parametrize("training", [True, False])
def test_counting_leaves_model_and_chance_as_they_were(training: bool) -> None:
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.5, batch_first=True)
    model = nn.Sequential(nn.Conv1d(TOKENS, TOKENS, 1), nn.BatchNorm1d(TOKENS), encoder).train(training)
    inputs = {"input": torch.randn(2, TOKENS, WIDTH)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chance = torch.get_rng_state()
    expected = TOKENS * (6 * 12 * WIDTH**2 + 12 * WIDTH * TOKENS) + 6 * TOKENS**2 * WIDTH
    assert flops_per_sample(model, inputs) == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), chance)


def test_batch_norm_is_counted_in_micro_batches_of_one_sample() -> None:
    config, worker = TrainConfig(), Worker(0, 1, torch.device("cpu"))
    model = nn.Sequential(nn.Linear(30, 70), nn.BatchNorm1d(70))
    meter = Meter.of(model, config, config.layout(1), worker)
    batch = MicroBatch({"input": torch.zeros(1, 30)}, torch.zeros(1))
    first, second = meter.utilisation(batch, 1, seconds=1.0), meter.utilisation(batch, 1, seconds=1.0)
    assert first is None
    assert second is not None


@pytest.fixture
def tf32() -> Iterator[None]:
    allow_tf32(True)
    yield
    allow_tf32(False)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA L40S", torch.float32, 183),  # TF32, as training allows it
    ],
)
@pytest.mark.usefixtures("tf32")
def test_peaks_are_those_of_the_data_sheets(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert gpu_peak_flops(name, dtype) == teraflops * 1e12


@pytest.mark.usefixtures("tf32")
def test_without_tf32_the_peak_is_that_of_fp32() -> None:
    allow_tf32(False)
    assert gpu_peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A1000", "Tesla K80"])
def test_a_peak_that_is_not_known_is_not_guessed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_peak_flops(name, torch.bfloat16) is None
    assert f"the peak of GPU '{name}' in torch.bfloat16 is not known" in capsys.readouterr().err
    assert utilisation(1000.0, 1e9, 1, None) is None


def test_a_cpus_peak_is_measured_once() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32) == peak_flops(cpu, torch.float32) > 1e8


def test_utilisation_by_hand() -> None:
    assert utilisation(samples_per_s=500, flops_per_sample=2e12, world_size=4, peak=1e15) == 0.25


def test_the_memory_of_a_cpu_is_that_of_the_process() -> None:
    before = memory_record(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = memory_record(torch.device("cpu"))
    assert before.peak_bytes <= after.peak_bytes >= held.nbytes
    assert (after.reserved_bytes, after.fragmentation) == (None, None)
