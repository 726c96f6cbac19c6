"""The engines that run on a CPU: what all must do, and what each refuses."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import openvino
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save_model
from torch import nn
from torch.backends import mha

from app.checksums import sha256_of_file
from app.engines.base import Engine, EngineSettings, PooledEngine, Signature
from app.engines.onnxruntime import open_oracle
from app.engines.registry import installed_engines, open_engine
from app.engines.torch import CompiledTorchEngine, TorchEngine
from app.errors import EngineError
from app.models.precision import allow_tf32
from app.tensors import OUTPUT, Tensors, TensorSpec
from tests.engine_contract import SIGNATURE, EngineContract, encoder, exported, rows
from tests.onnx_files import save_onnx
from tests.wording import refused

TWO_STREAMS = EngineSettings(streams=2)


class TestOpenVino(EngineContract):
    @pytest.fixture
    def opener(self, onnx: Path) -> Callable[[], Engine]:
        return lambda: open_engine("openvino", onnx, TWO_STREAMS)


class TestOpenVinoFromItsCache(EngineContract):
    @pytest.fixture
    def opener(self, onnx: Path) -> Callable[[], Engine]:
        settings = EngineSettings(streams=2, cache=onnx.parent / "cache")
        open_engine("openvino", onnx, settings).close()
        return lambda: open_engine("openvino", onnx, settings)


class TestOnnxRuntime(EngineContract):
    @pytest.fixture
    def opener(self, onnx: Path) -> Callable[[], Engine]:
        return lambda: open_engine("onnxruntime", onnx, TWO_STREAMS)


class TestPyTorch(EngineContract):
    @pytest.fixture
    def opener(self) -> Callable[[], Engine]:
        return lambda: TorchEngine(encoder(), SIGNATURE, TWO_STREAMS)


@pytest.mark.slow
class TestCompiledPyTorch(EngineContract):
    @pytest.fixture
    def opener(self) -> Callable[[], Engine]:
        return lambda: CompiledTorchEngine(encoder(), SIGNATURE, TWO_STREAMS)

    def test_threads_at_once(self, engine: Engine) -> None:
        super().test_threads_at_once(engine)
        assert mha.get_fastpath_enabled(), "others in this process had it before"


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(exported())
    return tmp_path / "model.onnx"


class Meeting(PooledEngine[str]):
    """An engine that answers when two batches run at once, or when it is let go."""

    name, version = "meeting", "1"

    def __init__(self) -> None:
        super().__init__(Signature((), ()), ["a", "b"])
        self.barrier = threading.Barrier(2, timeout=10)
        self.running = threading.Semaphore(0)

    def _run(self, member: str, inputs: Tensors) -> Tensors:
        self.running.release()
        self.barrier.wait()
        return {}


def test_pytorch_computes_float32_in_float32_whatever_the_process_did_before() -> None:
    allow_tf32(True)  # as training does, on GPUs
    TorchEngine(encoder(), SIGNATURE, TWO_STREAMS)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_compiled_pytorch_answers_for_every_size() -> None:
    engine = CompiledTorchEngine(encoder(), SIGNATURE, EngineSettings())
    for batch in (rows(3), rows(2, 8)):  # a single row would be compiled again
        expected = TorchEngine(encoder(), SIGNATURE, EngineSettings()).infer(batch)[OUTPUT]
        assert np.abs(engine.infer(batch)[OUTPUT] - expected).max() <= 1e-4


def test_openvino_leaves_its_threads_on_every_core(onnx: Path) -> None:
    """Pinned, the threads of two replicas would be on the same core."""
    tasks = Path("/proc/self/task")
    before = {path.name for path in tasks.iterdir()}
    engine = open_engine("openvino", onnx, EngineSettings(threads=2))
    engine.infer(rows(3))
    made = {path.name for path in tasks.iterdir()} - before
    assert made
    assert all(os.sched_getaffinity(int(item)) == os.sched_getaffinity(0) for item in made)
    engine.close()


_SIGNAL_AFTER_CLOSE = """
import gc, os, signal, sys, threading
from pathlib import Path
from app.engines.base import EngineSettings
from app.engines.registry import open_engine

engines = [open_engine("openvino", Path(sys.argv[1]), EngineSettings())]

def close():
    engines.pop().close()
    gc.collect()

closing = threading.Thread(target=close)
closing.start()
closing.join()
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_process_handles_signals_after_another_thread_closed_openvino(onnx: Path) -> None:
    """On a CPU with AMX, OpenVINO frees the signal stack of the thread that loaded the model."""
    command = [sys.executable, "-c", _SIGNAL_AFTER_CLOSE, str(onnx)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_what_fails_inside_a_library_is_an_error_of_the_engine() -> None:
    class Broken(nn.Module):
        def forward(self, **_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    with refused("engine.fails"):
        TorchEngine(Broken(), SIGNATURE, EngineSettings()).infer(rows(2))


def test_a_model_that_its_device_does_not_hold_is_an_error_of_the_engine() -> None:
    class TooLarge(nn.Module):
        def to(self, *_: object, **__: object) -> Self:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with refused("engine.not_opened"):
        TorchEngine(TooLarge(), SIGNATURE, EngineSettings())


def test_a_size_that_varies_may_be_fixed_in_what_is_expected_not_the_other_way_round() -> None:
    varies, fixed = (
        Signature((TensorSpec("x", np.dtype(np.float32), shape),), SIGNATURE.outputs) for shape in ((-1, -1), (-1, 8))
    )
    assert varies.difference(fixed) is None
    assert fixed.difference(varies) == "takes x float32 [-1, 8], expected x float32 [-1, -1]"


def test_streams_run_at_once_and_closing_waits_for_them() -> None:
    engine = Meeting()
    callers = [threading.Thread(target=engine.infer, args=({},)) for _ in range(2)]
    callers[0].start()
    engine.running.acquire()
    closing = threading.Thread(target=engine.close)
    callers[1].start()
    engine.running.acquire()  # both run, else the barrier would not open
    closing.start()
    for thread in (*callers, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert not engine.barrier.broken


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_broken_file_is_refused(name: str, onnx: Path) -> None:
    onnx.write_bytes(onnx.read_bytes()[:1000])
    with pytest.raises(EngineError, match=r"model\.onnx"):
        open_engine(name, onnx)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_type_that_numpy_has_not_is_refused(name: str, tmp_path: Path) -> None:
    identity = helper.make_node("Identity", ["given"], ["answer"])
    path = save_onnx(tmp_path / "bf16.onnx", [identity], dtype=TensorProto.BFLOAT16)
    with refused("dtype.unsupported"):
        open_engine(name, path)


def test_a_precision_that_the_cpu_lacks_is_refused_not_exchanged(onnx: Path) -> None:
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for precision, capability in (("bf16", "BF16"), ("fp16", "FP16")):
        settings = EngineSettings(precision=precision)
        if capability in capabilities:
            batch = rows(3)
            exact = open_engine("openvino", onnx).infer(batch)[OUTPUT]
            difference = np.abs(open_engine("openvino", onnx, settings).infer(batch)[OUTPUT] - exact).max()
            assert 0.0 < difference < 0.05
        else:
            with pytest.raises(EngineError, match=f"does not compute in {precision}: OpenVINO finds .*FP32"):
                open_engine("openvino", onnx, settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_refused_not_exchanged(onnx: Path) -> None:
    settings = EngineSettings(device="gpu")
    with pytest.raises(EngineError, match="CUDAExecutionProvider"):
        open_engine("onnxruntime", onnx, settings)
    with refused("gpu.missing"):
        TorchEngine(encoder(), SIGNATURE, settings)
    with refused("device.unsupported"):
        open_engine("openvino", onnx, settings)


def test_a_name_without_an_engine_is_refused(onnx: Path) -> None:
    with refused("engine.unknown"):
        open_engine("openvno", onnx)
    with refused("torch.no_file"):
        open_engine("torch", onnx)


@pytest.mark.skipif("tensorrt" in installed_engines(), reason="needs a machine without tensorrt")
def test_an_engine_that_is_not_installed_says_what_is_and_how(onnx: Path) -> None:
    with pytest.raises(EngineError) as refused:
        open_engine("tensorrt", onnx)
    assert "only openvino, onnxruntime" in str(refused.value)
    assert "pip install '.[tensorrt]' in the checkout" in str(refused.value)


def test_no_library_is_imported_before_its_engine_is_opened() -> None:
    code = (
        "import sys, app.engines.registry as r; r.installed_engines();"
        "print(sorted({'openvino', 'onnxruntime', 'tensorrt', 'tensorrt_rtx_bindings', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("damage", ["none", "cut", "changed", "empty"])
def test_what_openvino_compiled_is_kept_unless_it_was_damaged(damage: str, onnx: Path, tmp_path: Path) -> None:
    settings = EngineSettings(cache=tmp_path / "cache")
    expected = open_engine("openvino", onnx, settings).infer(rows(4))[OUTPUT]
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    changed = whole[:-500] + bytes([whole[-500] ^ 0x40]) + whole[-499:]
    kept.write_bytes({"none": whole, "cut": whole[:-100], "changed": changed, "empty": b""}[damage])
    before = kept.stat().st_mtime_ns

    moved = onnx.rename(tmp_path / "elsewhere.onnx")  # each fetch of a version has a folder of its own
    assert np.array_equal(open_engine("openvino", moved, settings).infer(rows(4))[OUTPUT], expected)
    assert list((tmp_path / "cache").iterdir()) == [kept]
    assert (kept.stat().st_mtime_ns == before) is (damage == "none")


def quantized(dtype: int, path: Path) -> Path:
    """Write a file that rounds two numbers to ``dtype`` in steps of 0.5, and adds the first to ten times the second."""
    constants = {
        "scale": np.array(0.5, np.float32),
        "zero": np.zeros((), helper.tensor_dtype_to_np_dtype(dtype)),
        "weight": np.array([[1.0], [10.0]], np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["given", "scale", "zero"], ["quantized"]),
        helper.make_node("DequantizeLinear", ["quantized", "scale", "zero"], ["rounded"]),
        helper.make_node("MatMul", ["rounded", "weight"], ["answer"]),
    ]
    return save_onnx(path, nodes, constants, answered=("rows", 1))


def test_the_oracle_computes_quantized_files_as_they_are_written(tmp_path: Path) -> None:
    given = {"given": np.array([[1.05, 1.6]], np.float32)}
    in_int8 = open_oracle(quantized(TensorProto.INT8, tmp_path / "int8.onnx")).infer(given)
    assert in_int8["answer"].tolist() == [[1.0 + 15.0]]
    # In steps of 0.5 these are 2.1 and 3.2; float8 has 3 bits of mantissa, and so 2, 2.25, … 3.25.
    in_fp8 = open_oracle(quantized(TensorProto.FLOAT8E4M3FN, tmp_path / "fp8.onnx")).infer(given)
    assert in_fp8["answer"].tolist() == [[1.0 + 16.25]]


def test_openvino_computes_a_quantized_file(tmp_path: Path) -> None:
    path = quantized(TensorProto.INT8, tmp_path / "int8.onnx")
    answer = open_engine("openvino", path, EngineSettings(precision="int8")).infer(
        {"given": np.array([[1.05, 1.6]], np.float32)}
    )
    assert answer["answer"].tolist() == [[1.0 + 15.0]]


def relu(path: Path) -> Path:
    return save_onnx(path, [helper.make_node("Relu", ["given"], ["answer"])])


@pytest.mark.parametrize(
    ("name", "precision", "make"),
    [
        ("openvino", "fp32", relu),  # which would answer 0 for NaN
        ("openvino", "int8", lambda path: quantized(TensorProto.INT8, path)),
        ("onnxruntime", "int8", lambda path: quantized(TensorProto.INT8, path)),
    ],
)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_an_engine_refuses_input_that_is_not_finite(
    odd: float, name: str, precision: Literal["fp32", "int8"], make: Callable[[Path], Path], tmp_path: Path
) -> None:
    engine = open_engine(name, make(tmp_path / "model.onnx"), EngineSettings(precision=precision))
    with refused("input.not_finite", "given"):
        engine.infer({"given": np.array([[1.0, 2.0], [odd, 1.0]], np.float32)})


def test_onnx_runtime_keeps_nan_in_float32(tmp_path: Path) -> None:
    """A model may read NaN as a missing number."""
    engine = open_engine("onnxruntime", relu(tmp_path / "model.onnx"))
    assert np.isnan(engine.infer({"given": np.array([[np.nan, 1.0]], np.float32)})["answer"][0, 0])


TABLE = np.arange(1.0, 13.0, dtype=np.float32).reshape(6, 2)


def table_of(way: str, path: Path) -> Path:
    """Write a model that gathers rows by indices, computed in the given ``way``."""
    constants = {"table": TABLE, "two": np.array([2]), "first": np.array(0), "both": np.array([1, 2])}
    nodes = {
        "with an offset": [
            helper.make_node("Add", ["given", "two"], ["index"]),
            helper.make_node("Gather", ["table", "index"], ["answer"]),
        ],
        "of one column": [
            helper.make_node("Gather", ["given", "first"], ["column"], axis=1),
            helper.make_node("Gather", ["table", "column"], ["answer"]),
        ],
        "of each axis": [helper.make_node("GatherND", ["table", "given"], ["answer"])],
        "of elements": [
            helper.make_node("Expand", ["given", "both"], ["index"]),
            helper.make_node("GatherElements", ["table", "index"], ["answer"]),
        ],
    }[way]
    used = {name for node in nodes for name in node.input} - {"given", "column", "index"}
    rows_only = way != "with an offset"
    given = helper.make_tensor_value_info("given", TensorProto.INT64, ["rows", 1] if rows_only else ["rows"])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["rows", 2])
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items() if name in used]
    graph = helper.make_graph(nodes, "g", [given], [answer], initializers)
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("way", ["with an offset", "of one column", "of each axis", "of elements"])
def test_openvino_refuses_an_index_out_of_range(way: str, cached: bool, tmp_path: Path) -> None:
    path, settings = table_of(way, tmp_path / "m.onnx"), EngineSettings(cache=tmp_path / "cache" if cached else None)
    if cached:
        open_engine("openvino", path, settings).close()
    engine, offset = open_engine("openvino", path, settings), 2 if way == "with an offset" else 0

    def answer(index: int) -> list[float]:
        shape = (1,) if way == "with an offset" else (1, 1)
        found: list[float] = engine.infer({"given": np.full(shape, index - offset)})["answer"][0].tolist()
        return found

    assert [spec.name for spec in engine.signature.outputs] == ["answer"]
    assert [answer(index) for index in (0, 5, -1, -6)] == TABLE[[0, 5, -1, -6]].tolist()
    for index in (6, -7, 2**31 - 1):
        with refused("index.range"):
            answer(index)


@pytest.mark.parametrize("cached", [False, True])
def test_openvino_refuses_a_length_beyond_the_table_of_positions(cached: bool, tmp_path: Path) -> None:
    """OpenVINO itself would use zeros for the missing positions."""
    nodes = [
        helper.make_node("Gather", ["table", "given"], ["words"]),
        helper.make_node("Shape", ["given"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "second"], ["length"]),
        helper.make_node("Range", ["first", "length", "second"], ["range"]),
        helper.make_node("Gather", ["table", "range"], ["positions"]),
        helper.make_node("Add", ["words", "positions"], ["answer"]),
    ]
    constants = {"table": TABLE, "first": np.array(0), "second": np.array(1)}
    path, sizes = tmp_path / "m.onnx", ("rows", "length")
    save_onnx(path, nodes, constants, sizes, answered=(*sizes, 2), dtype=TensorProto.INT64)
    settings = EngineSettings(cache=tmp_path / "cache" if cached else None)
    if cached:
        open_engine("openvino", path, settings).close()
    engine = open_engine("openvino", path, settings)
    for _ in range(2):
        assert (engine.infer({"given": np.zeros((2, 6), np.int64)})["answer"] == TABLE[0] + TABLE).all()
        with refused("index.range"):
            engine.infer({"given": np.zeros((1, 7), np.int64)})


def reshaping(path: Path) -> Path:
    """Write a model that fails unless it is given a multiple of four numbers."""
    nodes = [
        helper.make_node("Relu", ["given"], ["positive"]),
        helper.make_node("Reshape", ["positive", "four"], ["answer"]),
    ]
    constants = {"four": np.array([-1, 4])}
    return save_onnx(path, nodes, constants, shape=("rows", "columns"), answered=("rows", 4))


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(threads=2), TWO_STREAMS])
def test_a_batch_that_openvino_cannot_compute_changes_no_other_answer(settings: EngineSettings, tmp_path: Path) -> None:
    """OpenVINO itself repeats the previous answer with one thread, and keeps the sizes for later batches."""
    path = reshaping(tmp_path / "m.onnx")
    kept = {"cache": tmp_path / "cache", "sha256": sha256_of_file(path)}
    engine = open_engine("openvino", path, replace(settings, **kept))
    path.unlink()  # as a replica does
    for number in range(1, 7):
        given = np.full((2, 4), number, np.float32)
        assert (engine.infer({"given": given})["answer"] == given).all()
        with pytest.raises(EngineError, match="conflicts with the reshape pattern"):
            engine.infer({"given": np.ones((1, 6), np.float32)})


def test_openvino_answers_nothing_after_a_failed_batch_if_the_model_is_gone(tmp_path: Path) -> None:
    """The replica then fails its health check, and Ray Serve replaces it."""
    path = reshaping(tmp_path / "m.onnx")
    engine = open_engine("openvino", path)
    path.unlink()
    with pytest.raises(EngineError, match="conflicts with the reshape pattern"):
        engine.infer({"given": np.ones((1, 6), np.float32)})
    with pytest.raises(EngineError, match="cannot load"):
        engine.infer({"given": np.ones((2, 4), np.float32)})


@pytest.mark.parametrize("number", [2**31, 2**32 + 5, -(2**31) - 1])
def test_openvino_refuses_integers_beyond_32_bits(number: int, tmp_path: Path) -> None:
    """OpenVINO would truncate it, and read 2³² + 5 as 5."""
    node = helper.make_node("Identity", ["given"], ["answer"])
    engine = open_engine("openvino", save_onnx(tmp_path / "m.onnx", [node], dtype=TensorProto.INT64))
    whole = np.array([[2**31 - 1, -(2**31)]])
    assert (engine.infer({"given": whole})["answer"] == whole).all()
    with refused("tensor.range", "given"):
        engine.infer({"given": np.array([[number, 0]])})
