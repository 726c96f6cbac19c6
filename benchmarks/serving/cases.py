"""What is measured: which servers, with which model behind them, are asked for what."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.serving.contenders import Contender
from benchmarks.serving.loops import best_rate
from benchmarks.serving.models import Models, ServedModel
from benchmarks.serving.peer import Peer
from benchmarks.serving.rayloom import Rayloom
from benchmarks.serving.servers import ALONE, EAGER, SERVERS, TRITON_GRPC, Server
from benchmarks.serving.wire import GrpcTensors, JsonTensors
from benchmarks.serving.workloads import Workload, workload

RAYLOOM, IN_JSON, OVER_GRPC = "Rayloom", "Rayloom, JSON", "Rayloom, gRPC"
TRITON_IN_JSON = "NVIDIA Triton, JSON, batching"
BATCHING_OFF, CHOSEN = "Rayloom, batching off", "Rayloom, compile's choice"
SAME_FILE_LOOP, CHOSEN_LOOP = "bare loop, the same file", "bare loop, compile's choice"

_OFF = ("serve.batching={max_batch_size: 1, preferred_batch_sizes: [], timeout_us: 0}",)


@dataclass(frozen=True)
class Field:
    """The peers that take part, and the folder of their virtual environments."""

    servers: Sequence[Server]
    environments: Path

    def peers(self, model: ServedModel) -> list[Peer]:
        """Each server in every way that it is run."""
        return [peer for server in self.servers for peer in self.ways(server, model)]

    def ways(self, server: Server, model: ServedModel) -> list[Peer]:
        """One server in every way that it is run."""
        return [Peer(server, model, batching, self.environments) for batching in server.batchings]

    def eager(self, model: ServedModel) -> Peer:
        """PyTorch, one request at a time."""
        return Peer(EAGER, model, ALONE, self.environments)


@dataclass(frozen=True)
class Case:
    """One race."""

    title: str
    own: Sequence[Contender]
    peers: Sequence[Peer]
    workload: Workload
    loops: Mapping[str, Callable[[], float]]
    """Bare engines, each a function that measures its rows a second."""


def tiny_cnn(models: Models, field: Field) -> Case:
    """Measure a server's own cost, with a model that takes almost no time."""
    return Case(
        "Tiny CNN",
        [Rayloom(RAYLOOM, models.cnn), Rayloom(IN_JSON, models.cnn, encoding=JsonTensors)],
        field.peers(models.cnn),
        workload(models.cnn.onnx, models.pictures),
        {SAME_FILE_LOOP: partial(best_rate, models.cnn, models.pictures)},
    )


def grpc(models: Models, field: Field) -> Case:
    """The same model over gRPC, beside Triton alone."""
    return Case(
        "Tiny CNN, gRPC",
        [Rayloom(OVER_GRPC, models.cnn, encoding=GrpcTensors)],
        field.ways(TRITON_GRPC, models.cnn),
        workload(models.cnn.onnx, models.pictures),
        {},
    )


def encoder(models: Models, field: Field) -> Case:
    """Measure how much of the engine's throughput remains behind a server, with a model that takes milliseconds."""
    rows = models.short_texts
    return Case(
        "Sentence encoder, 32 tokens",
        [
            Rayloom(RAYLOOM, models.encoder),
            Rayloom(BATCHING_OFF, models.encoder, _OFF),
            Rayloom(CHOSEN, models.chosen),
        ],
        field.peers(models.encoder),
        workload(models.encoder.onnx, rows),
        {
            SAME_FILE_LOOP: partial(best_rate, models.encoder, rows),
            CHOSEN_LOOP: partial(best_rate, models.chosen, rows),
        },
    )


def texts(models: Models, field: Field) -> Case:
    """The whole stack beside what a person writes first, on texts of every length."""
    return Case(
        "Sentence encoder, texts of every length",
        [Rayloom(CHOSEN, models.chosen)],
        [field.eager(models.encoder)],
        workload(models.encoder.onnx, models.texts),
        {CHOSEN_LOOP: partial(best_rate, models.chosen, models.texts)},
    )


@dataclass(frozen=True)
class SteadyCase:
    """Two servers asked at one rate, a share of what ``baseline`` can answer."""

    title: str
    own: Contender
    baseline: Peer
    share: float
    """Share of the rate that ``baseline`` answers on 16 connections without pauses."""
    workload: Workload


def steady_texts(models: Models, field: Field) -> SteadyCase:
    """Latency of the whole stack at a load that PyTorch eager can just carry."""
    own, rows = Rayloom(CHOSEN, models.chosen), workload(models.encoder.onnx, models.texts)
    return SteadyCase("Texts of every length", own, field.eager(models.encoder), 0.8, rows)


def steady_cnn(models: Models, field: Field) -> SteadyCase:
    """Latency of the server alone at half the load that Triton can carry."""
    triton = SERVERS["triton"]
    baseline = Peer(triton, models.cnn, triton.batchings[-1], field.environments)
    rows = workload(models.cnn.onnx, models.pictures)
    return SteadyCase("Tiny CNN", Rayloom(RAYLOOM, models.cnn), baseline, 0.5, rows)


CASES: Mapping[str, Callable[[Models, Field], Case]] = {
    "cnn": tiny_cnn,
    "grpc": grpc,
    "encoder": encoder,
    "texts": texts,
}
STEADY_CASES: Mapping[str, Callable[[Models, Field], SteadyCase]] = {
    "steady_cnn": steady_cnn,
    "steady_texts": steady_texts,
}
