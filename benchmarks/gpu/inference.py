"""The torch engine on a GPU: its latency by batch size, and its float32 accuracy."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from app.compile.export import export_onnx
from app.config import GatesConfig
from app.engines.base import Engine, EngineSettings, Signature
from app.engines.registry import open_engine
from app.engines.torch import TorchEngine
from app.models.image import small_cnn
from app.models.precision import allow_tf32
from app.tensors import OUTPUT, Tensors, TensorSpec
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.card import median_s, torch_device
from benchmarks.gpu.floors import forward_floor

_BATCHES, _LENGTH = (1, 8, 32, 128), 128
_SMALL_BATCHES, _SMALL_LENGTH = (1, 4), 16
_REPEATS = 50
_PICTURES = (64, 3, 32, 32)
_IDS = np.dtype(np.int64)
_FLOATS = np.dtype(np.float32)
_CUDA = "CUDAExecutionProvider"


class _Encoder(nn.Module):
    """A pretrained encoder that returns the mean of the last hidden state over the tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertModel

        super().__init__()
        self.bert = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return embeddings of shape (batch, width) for ids and mask of shape (batch, length), each int64."""
        hidden: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if attention_mask is None:
            return hidden.mean(1)
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)

    @property
    def signature(self) -> Signature:
        """The inputs and the output, for any batch size and length."""
        inputs = (TensorSpec("input_ids", _IDS, (-1, -1)), TensorSpec("attention_mask", _IDS, (-1, -1)))
        return Signature(inputs, (TensorSpec(OUTPUT, _FLOATS, (-1, self.bert.config.hidden_size)),))

    def rows(self, count: int, length: int) -> Tensors:
        """Return a batch of random ids without padding."""
        ids = np.random.default_rng(count).integers(1000, self.bert.config.vocab_size, (count, length))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def measure_latency(bench: Bench) -> None:
    """Record ms by batch size: the engine, eager PyTorch and a CUDA graph in bf16, and ONNX Runtime in fp32."""
    device = torch_device(bench)
    encoder = _Encoder(bench.weights).eval()
    precise = _onnx_on_cuda(encoder)
    engine = TorchEngine(encoder, encoder.signature, EngineSettings(device=bench.device, precision="bf16"))
    batches, length = (_SMALL_BATCHES, _SMALL_LENGTH) if bench.is_small else (_BATCHES, _LENGTH)
    for count in batches:
        rows = encoder.rows(count, length)
        tensors = {name: torch.from_numpy(array).to(device) for name, array in rows.items()}
        floor = forward_floor(encoder, tensors, "bf16")
        eager_s = median_s(lambda rows=rows: _eager(encoder, rows, device), device, _REPEATS)  # type: ignore[misc]
        engine_s = median_s(lambda rows=rows: engine.infer(rows), device, _REPEATS)  # type: ignore[misc]
        bench.compare(f"batch {count}, engine", 1e3 * engine_s, "ms", 1e3 * eager_s, "eager PyTorch")
        bench.compare_with_floor(f"batch {count}, eager, with copies", eager_s, floor, "bf16")
        if precise:
            precise_s = median_s(lambda rows=rows: precise.infer(rows), device, _REPEATS)  # type: ignore[misc]
            bench.compare(
                f"batch {count}, ONNX Runtime, fp32", 1e3 * precise_s, "ms", 1e3 * engine_s, "the engine, bf16"
            )
    if device.type == "cuda":
        _measure_graphs(bench, encoder, device)
    if precise is None:
        bench.figure("ONNX Runtime on CUDA", f"not installed; its providers are {_providers()}")


def _measure_graphs(bench: Bench, encoder: _Encoder, device: torch.device) -> None:
    """Record the latency of only the forward pass, with and without a CUDA graph.

    No mask is used, because transformers would read its values, which a graph cannot do.
    """
    for count in _BATCHES:
        ids = torch.from_numpy(encoder.rows(count, _LENGTH)["input_ids"]).to(device)
        forward_s = median_s(lambda ids=ids: _forward(encoder, {"input_ids": ids}), device, _REPEATS)  # type: ignore[misc]
        graph, output = _capture(encoder, {"input_ids": ids})
        graph_s = median_s(graph.replay, device, _REPEATS)
        bench.compare(f"batch {count}, CUDA graph", 1e3 * graph_s, "ms", 1e3 * forward_s, "the same without a graph")
        difference = float((output - _forward(encoder, {"input_ids": ids})).abs().max())
        bench.figure(f"batch {count}, difference of the graph's output", difference)


def measure_float32(bench: Bench) -> None:
    """Record the difference of float32 on the device from float32 on the CPU, with and without TF32."""
    device, gate = torch_device(bench), GatesConfig().max_difference
    torch.manual_seed(0)
    encoder = _Encoder(bench.weights).eval()
    network = small_cnn(num_labels=10, channels=3, width=64).eval()
    pictures = np.random.default_rng(0).standard_normal(_PICTURES, np.float32)
    for name, model, signature, rows in (
        ("encoder", encoder, encoder.signature, encoder.rows(8, _SMALL_LENGTH)),
        ("convolutions", network, _picture_signature(), {"pixel_values": pictures}),
    ):
        expected = TorchEngine(model, signature, EngineSettings(device="cpu")).infer(rows)[OUTPUT]
        engine = TorchEngine(model, signature, EngineSettings(device=bench.device))
        difference = _difference(engine.infer(rows)[OUTPUT], expected)
        bench.compare(f"{name}, largest difference", difference, "", gate, "gate of fp32", difference <= gate)
        allow_tf32(True)
        difference = _difference(_eager(model, rows, device, torch.float32), expected)
        bench.compare(f"{name}, with TF32", difference, "", gate, "gate of fp32")
        allow_tf32(False)


def _forward(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    device = next(iter(inputs.values())).device.type
    with torch.inference_mode(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
        output: Tensor = model(**inputs)
        return output


def _eager(model: nn.Module, rows: Tensors, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Run the model as the engine does, in plain PyTorch: from NumPy to the device and back."""
    inputs = {name: torch.from_numpy(array).to(device) for name, array in rows.items()}
    return _forward(model, inputs, dtype).float().cpu().numpy()


def _capture(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of the model's kernels on ``inputs``, and the tensor that it writes."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            _forward(model, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Autocast's cache would keep weights that were cast outside the graph.
    with torch.autocast("cuda", cache_enabled=False), torch.cuda.graph(graph):
        output = _forward(model, inputs)
    return graph, output


def _onnx_on_cuda(encoder: _Encoder) -> Engine | None:
    """Return the encoder in ONNX Runtime on the GPU; None if ONNX Runtime has no CUDA."""
    if _CUDA not in onnxruntime.get_available_providers():
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export_onnx(encoder, encoder.signature.inputs, encoder.rows(2, _SMALL_LENGTH), file)
        return open_engine("onnxruntime", file, EngineSettings(device="gpu"))


def _providers() -> str:
    return ", ".join(onnxruntime.get_available_providers())


def _picture_signature() -> Signature:
    pixels = TensorSpec("pixel_values", _FLOATS, (-1, *_PICTURES[1:]))
    return Signature((pixels,), (TensorSpec(OUTPUT, _FLOATS, (-1, 10)),))


def _difference(given: Any, expected: Any) -> float:
    return float(np.abs(given - expected).max())
