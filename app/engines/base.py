"""The interface of inference engines, their settings, and what their implementations share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Condition
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from app.config import ComputePrecision
from app.engines.architecture import Device
from app.errors import CompileError, EngineError, RayloomError
from app.tensors import (
    Tensor,
    Tensors,
    TensorSpec,
    check_tensors,
    concat_rows,
    count_rows,
    group_by_shape,
    is_finite,
    slice_rows,
)

Member = TypeVar("Member")


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def length_axis(self) -> tuple[str, int] | None:
        """The first input with a dynamic axis other than the rows, and that axis; None if input sizes are fixed."""
        dynamic = (
            (spec.name, axis) for spec in self.inputs for axis, size in enumerate(spec.shape) if axis and size < 0
        )
        return next(dynamic, None)

    @property
    def takes_one_row(self) -> bool:
        """Whether the number of rows is fixed at 1, as in a file that was exported with a batch of 1."""
        return any(spec.shape[:1] == (1,) for spec in self.inputs)

    def difference(self, expected: "Signature") -> str | None:
        """Return the difference from ``expected``, as the end of a sentence; None if there is none.

        A size that is dynamic here may be fixed there.
        """
        for verb, given, wanted in (
            ("takes", self.inputs, expected.inputs),
            ("gives", self.outputs, expected.outputs),
        ):
            if not _fit({spec.name: spec for spec in given}, {spec.name: spec for spec in wanted}):
                return f"{verb} {_listed(given)}, expected {_listed(wanted)}"
        return None


def _fit(given: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> bool:
    return given.keys() == wanted.keys() and all(
        given[name].dtype == spec.dtype
        and len(given[name].shape) == len(spec.shape)
        and all(size in (-1, fixed) for size, fixed in zip(given[name].shape, spec.shape, strict=True))
        for name, spec in wanted.items()
    )


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(Tensor.of(spec)) for spec in specs) or "nothing"


@dataclass(frozen=True)
class EngineSettings:
    """Settings for running a compiled model.

    Raises:
        EngineError: a number is below 1.
    """

    precision: ComputePrecision = "fp32"
    """The precision of the computation. For int8 and fp8 the file says which layers; the others are float32."""
    threads: int = 1
    """CPU threads of each stream."""
    streams: int = 1
    """Batches that run concurrently; further ones wait."""
    device: Device = "cpu"
    """The device of ONNX Runtime and PyTorch. OpenVINO always runs on the CPU, TensorRT on the GPU."""
    cache: Path | None = None
    """A local folder for results of compilation on loading, so that the next load is faster."""
    sha256: str | None = None
    """The file's sha256, the key in the cache. If not given, it is computed. It stands for shards beside it, too."""

    def __post_init__(self) -> None:
        if self.streams < 1 or self.threads < 1:
            raise EngineError(f"{self.threads} threads and {self.streams} streams: expected 1 or more of each").of(
                "threads.none"
            )


class Engine(Protocol):
    """A compiled model in memory."""

    @property
    def name(self) -> str:
        """The name in recipes and manifests."""
        ...

    @property
    def version(self) -> str:
        """The version of the library."""
        ...

    @property
    def signature(self) -> Signature:
        """The inputs and outputs of ``infer``."""
        ...

    def infer(self, inputs: Tensors) -> Tensors:
        """Run one batch; safe to call from several threads.

        Raises:
            RequestError: an input is missing, unknown, or of the wrong dtype or shape.
            EngineError: the engine is closed, or its library failed.
        """
        ...

    def run(self, inputs: Tensors) -> Tensors:
        """Run one batch whose inputs were checked before. Raises EngineError as ``infer`` does."""
        ...

    def close(self) -> None:
        """Wait for running batches, and free the memory."""
        ...


def spec_of(path: Path, name: str, kind: str, dtypes: Mapping[str, str], shape: Sequence[int]) -> TensorSpec:
    """Return the spec of tensor ``name`` in the file ``path``.

    Args:
        kind: the library's name of the tensor's type.
        dtypes: numpy's names by the library's.

    Raises:
        EngineError: ``dtypes`` lacks the type.
    """
    if kind not in dtypes:
        raise EngineError(
            f"{str(path)!r}: {name!r} is of type {kind}, which engines do not take: expected {', '.join(dtypes)}; "
            "cast it in the model"
        ).of("dtype.unsupported")
    return TensorSpec(name, np.dtype(dtypes[kind]), tuple(shape))


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library, each of which has its own classes, into an EngineError that starts with ``what``."""
    try:
        yield
    except RayloomError:
        raise
    except Exception as error:
        raise EngineError(f"{what}: {error}").of("engine.not_opened") from error


def require_finite(inputs: Tensors, engine: str) -> None:
    """Raise EngineError if a float input has NaN or infinity, which the engine may turn into a finite number.

    A maximum may ignore NaN, and int8 has no NaN.
    """
    for name, tensor in inputs.items():
        if tensor.dtype.kind == "f" and not is_finite(tensor):
            raise EngineError(
                f"input {name!r} is not finite, and {engine} may turn it into a finite number: give finite numbers"
            ).of("input.not_finite", name)


class PooledEngine(ABC, Generic[Member]):
    """An engine with several streams, each of which is a member of a pool. One thread at a time uses a member."""

    def __init__(self, signature: Signature, members: Iterable[Member]) -> None:
        """Create the members.

        Args:
            members: a generator if creating a member can fail, for example for lack of memory.

        Raises:
            EngineError: the library cannot create one.
        """
        self._signature = signature
        with library_errors("the engine cannot be opened"):
            self._pool = _Pool(members)

    @property
    def signature(self) -> Signature:
        return self._signature

    def infer(self, inputs: Tensors) -> Tensors:
        check_tensors(inputs, self._signature.inputs)
        return self.run(inputs)

    def run(self, inputs: Tensors) -> Tensors:
        member = self._pool.take()
        try:
            return self._run(member, inputs)
        except RayloomError:
            raise
        except Exception as error:
            raise EngineError(f"the engine failed on a batch: {error}").of("engine.fails") from error
        finally:
            self._pool.give_back(member)

    def close(self) -> None:
        self._pool.close()

    @abstractmethod
    def _run(self, member: Member, inputs: Tensors) -> Tensors:
        """Run a batch that fits the signature. The caller owns the result."""


class _Pool(Generic[Member]):
    """Lend each member to one thread at a time. The last one returned is lent first, because its caches are warm."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._free = list(members)
        self._size = len(self._free)
        self._changed = Condition()
        self._closed = False

    def take(self) -> Member:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise EngineError("the engine is closed: open it again").of("engine.closed")
            return self._free.pop()

    def give_back(self, member: Member) -> None:
        with self._changed:
            self._free.append(member)
            # ``close`` waits for the same condition, so a single wake-up could miss ``take``.
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._free) == self._size)
            self._free.clear()
            # A second call of ``close`` must not wait.
            self._size = 0


class ShapeProfile(BaseModel):
    """The sizes that a model was measured at, and that a TensorRT plan is built for.

    Raises:
        CompileError: there is no batch size, or sizes do not ascend from 1 or more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: tuple[int, ...]
    """Numbers of rows. A plan pads a batch to the next one."""

    lengths: tuple[int, ...] = ()
    """Lengths of rows, in tokens; empty if inputs have one size."""

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if not self.batch_sizes:
            raise CompileError("compile.batch_sizes is empty: give one number of rows at least").of(
                "sizes.empty", "compile.batch_sizes"
            )
        for key, sizes in (("compile.batch_sizes", self.batch_sizes), ("data.buckets", self.lengths)):
            if any(smaller >= larger for smaller, larger in pairwise((0, *sizes))):
                raise CompileError(f"{key} is {list(sizes)}: expected sizes that ascend from 1 or more").of(
                    "sizes.order", key
                )
        return self


def infer_many(engine: Engine, requests: Sequence[Tensors], max_rows: Callable[[Tensors], int]) -> list[Tensors]:
    """Run many requests in as few calls as their shapes allow. Return the outputs of each, in order.

    Requests share calls if their rows have the same shape. A request with too many rows for one call takes several.

    Args:
        max_rows: returns the maximum rows of a call for requests with the shape of its argument.
    """
    answers: list[list[Tensors]] = [[] for _ in requests]
    for group in group_by_shape(requests):
        # All requests of a group have one shape, so the first one stands for them.
        for members in _calls(requests, group, max_rows(requests[group[0]])):
            outputs = engine.infer(concat_rows([piece for _, piece in members]))
            start = 0
            for index, piece in members:
                stop = start + count_rows(piece)
                answers[index].append(slice_rows(outputs, start, stop))
                start = stop
    return [concat_rows(parts) for parts in answers]


def _calls(requests: Sequence[Tensors], group: Sequence[int], max_rows: int) -> Iterator[list[tuple[int, Tensors]]]:
    """Yield the pieces of each call for requests of one shape. The pieces of a request stay in order."""
    call: list[tuple[int, Tensors]] = []
    rows = 0
    for index in group:
        for start in range(0, count_rows(requests[index]), max_rows):
            piece = slice_rows(requests[index], start, start + max_rows)
            more = count_rows(piece)
            if rows + more > max_rows:
                yield call
                call, rows = [], 0
            call.append((index, piece))
            rows += more
    yield call
