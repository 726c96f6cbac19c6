"""TensorRT without a GPU: the buffers, profiles and graphs of a lane, and which plans are refused before they load."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from app.checksums import sha256_of
from app.engines.base import PooledEngine, ShapeProfile
from app.engines.tensorrt.lane import Lane, LoadedPlan
from app.engines.tensorrt.manifest import (
    BuildSettings,
    Machine,
    PlanKey,
    PlanManifest,
    manifest_path,
    read_plan,
    write_plan,
)
from app.engines.tensorrt.profiles import index_of, optimization_profiles
from app.tensors import Tensor, Tensors
from tests.fake_gpu import Context, Gpu
from tests.wording import refused

PLAN = b"a plan"
PROFILE = ShapeProfile(batch_sizes=(1, 4, 8), lengths=(16, 32))


def manifest(machine: Machine) -> PlanManifest:
    settings = BuildSettings(precision="fp32", profile=PROFILE)
    inputs = tuple(Tensor(name=name, dtype="int64", shape=(-1, -1)) for name in ("input_ids", "attention_mask"))
    return PlanManifest(
        key=PlanKey(machine=machine, onnx_sha256="0" * 64, settings=settings),
        plan_sha256=sha256_of(PLAN),
        inputs=inputs,
        outputs=(Tensor(name="logits", dtype="float32", shape=(-1, 1)),),
        profiles=tuple(
            {input_.name: profile.bounds(input_.shape) for input_ in inputs}
            for profile in optimization_profiles(PROFILE)
        ),
    )


HERE = manifest(Machine(engine="tensorrt", engine_version="11.4.0.106", architectures=("SM90",)))


class Lanes(PooledEngine[Lane]):
    """As TensorRtEngine has them, over contexts of ours."""

    name, version = "tensorrt", "-"

    def __init__(self, count: int = 1, refuses: str = "", captures_graphs: bool = False) -> None:
        self.gpu = Gpu(refuses)
        self.refuses = refuses
        self.contexts: list[Context] = []
        self.messages: list[str] = []
        plan = LoadedPlan(HERE, self._context, 1024, captures_graphs, self.messages)
        super().__init__(HERE.signature, (Lane(self.gpu, plan) for _ in range(count)))

    def _context(self) -> Context | None:
        if self.refuses == "create_execution_context":
            self.messages.append("the library's reason")
            return None
        self.contexts.append(Context(self.gpu, self.refuses, self.messages))
        return self.contexts[-1]

    def _run(self, member: Lane, inputs: Tensors) -> Tensors:
        return member.infer(inputs)


def batch(count: int, length: int) -> Tensors:
    generator = np.random.default_rng(count * 100 + length)
    return {name: generator.integers(0, 5, (count, length)) for name in ("input_ids", "attention_mask")}


def total(inputs: Tensors) -> np.ndarray:
    return (inputs["input_ids"] * inputs["attention_mask"]).sum(-1, keepdims=True).astype(np.float32)


def test_each_size_that_is_declared_has_a_profile_a_context_and_a_graph() -> None:
    lanes = Lanes()
    assert [context.profile for context in lanes.contexts] == [0, 1, 2, 3, 4, 5]
    assert len({context.scratch for context in lanes.contexts}) == 1  # they run one at a time
    assert [len(graph.launched) for graph in lanes.gpu.graphs] == [1] * 6
    assert HERE.profiles[0]["input_ids"] == ((1, 1), (1, 16), (1, 16))
    assert HERE.profiles[5]["attention_mask"] == ((5, 17), (8, 32), (8, 32))


def test_every_size_up_to_the_largest_is_in_one_profile() -> None:
    for rows, length in itertools.product(range(1, 9), range(1, 33)):
        holding = [
            index
            for index, bounds in enumerate(HERE.profiles)
            for smallest, _, largest in [bounds["input_ids"]]
            if smallest[0] <= rows <= largest[0] and smallest[1] <= length <= largest[1]
        ]
        assert holding == [index_of(PROFILE, rows, length)]


@pytest.mark.parametrize("captures_graphs", [False, True])
def test_batches_are_padded_up_and_their_rows_given_back(captures_graphs: bool) -> None:
    lanes = Lanes(captures_graphs=captures_graphs)
    for length in (16, 32):
        for count in (3, 1, 8, 2, 5):
            inputs = batch(count, length)
            assert np.array_equal(lanes.infer(inputs)["logits"], total(inputs))
    assert len(lanes.contexts) == 6
    assert sum(graph.replays for graph in lanes.gpu.graphs) == (0 if captures_graphs else 10)


def test_a_length_between_runs_in_the_profile_that_holds_it_without_a_graph() -> None:
    lanes = Lanes()
    for count, length, profile in ((2, 7, 2), (8, 17, 5), (1, 31, 1)):
        inputs = batch(count, length)
        assert np.array_equal(lanes.infer(inputs)["logits"], total(inputs))
        assert lanes.contexts[-1].profile == profile
    assert len(lanes.gpu.graphs) == 6
    assert not any(graph.replays for graph in lanes.gpu.graphs)


def test_what_no_profile_holds_is_refused() -> None:
    lanes = Lanes()
    with refused("batch.too_large"):
        lanes.infer(batch(9, 16))
    with refused("tensor.shape", "input_ids"):
        lanes.infer(batch(1, 33))
    with refused("batch.lengths", "attention_mask"):
        lanes.run(batch(2, 16) | {"attention_mask": np.ones((2, 1), np.int64)})


def test_rows_that_pad_are_rows_that_were_given() -> None:
    lanes = Lanes()
    lanes.infer({"input_ids": np.full((3, 16), 4), "attention_mask": np.ones((3, 16), np.int64)})
    assert lanes.contexts[2].ids().tolist() == [[4] * 16] * 4


@pytest.mark.parametrize(
    ("refuses", "rule"),
    [
        ("empty", "engine.not_opened"),
        ("create_execution_context", "tensorrt.call_refused"),
        ("set_optimization_profile_async", "tensorrt.call_refused"),
        ("set_input_shape", "tensorrt.call_refused"),
        ("set_tensor_address", "tensorrt.call_refused"),
        ("infer_shapes", "tensorrt.shapes_unknown"),
        ("get_tensor_shape", "shape.depends_on_values"),
        ("execute_async_v3", "tensorrt.call_refused"),
    ],
)
def test_every_refusal_of_the_library_is_an_error(refuses: str, rule: str) -> None:
    with refused(rule):
        Lanes(refuses=refuses)


def test_a_refusal_is_told_with_its_own_reason_and_none_from_before() -> None:
    lanes = Lanes()
    lanes.messages.append("a warning of yesterday")
    lanes.refuses = "execute_async_v3"  # of the contexts that are made for a length between
    for _ in range(2):
        with refused("tensorrt.call_refused"):
            lanes.infer(batch(2, 7))


def test_a_manifest_with_sizes_that_cannot_be_is_no_plan(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    write_plan(plan, PLAN, HERE)
    beside = manifest_path(plan)
    beside.write_text(beside.read_text(encoding="utf-8").replace("16", "64"), encoding="utf-8")
    with refused("manifest.damaged"):
        read_plan(plan)


def test_lanes_share_nothing() -> None:
    lanes = Lanes(count=2)
    assert len({context.scratch for context in lanes.contexts}) == 2
    wrong: list[int] = []

    def ask(count: int) -> None:
        inputs = batch(count, 16)
        wrong.extend(count for _ in range(200) if not np.array_equal(lanes.infer(inputs)["logits"], total(inputs)))

    threads = [threading.Thread(target=ask, args=(count,)) for count in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"architectures": ("SM80", "SM90")}, True),
        ({"architectures": ("SM89",)}, False),
        ({"engine": "tensorrt_rtx"}, False),
        ({"engine_version": "11.4.0.105"}, False),
        ({"system": "win32-AMD64"}, False),
    ],
)
def test_a_machine_runs_the_plans_that_were_built_for_it(change: dict[str, object], runs: bool) -> None:
    here = HERE.key.machine
    assert here.runs(here.model_copy(update=change)) is runs


def test_a_machine_without_a_gpu_runs_no_plan() -> None:
    here = HERE.key.machine
    assert not here.model_copy(update={"architectures": ()}).runs(here)


@pytest.mark.parametrize(
    ("batch_sizes", "lengths", "rule", "key"),
    [
        ((), (), "sizes.empty", "compile.batch_sizes"),
        ((4, 1), (), "sizes.order", "compile.batch_sizes"),
        ((1,), (16, 8), "sizes.order", "data.buckets"),
    ],
)
def test_sizes_that_cannot_be_are_named_by_their_key(
    batch_sizes: tuple[int, ...], lengths: tuple[int, ...], rule: str, key: str
) -> None:
    with refused(rule, key):
        ShapeProfile(batch_sizes=batch_sizes, lengths=lengths)
