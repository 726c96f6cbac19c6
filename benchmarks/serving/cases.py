"""What is measured: which servers, with which model behind them, are asked for what."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.serving.contenders import Contender
from benchmarks.serving.loops import best_rate
from benchmarks.serving.models import Models, ServedModel
from benchmarks.serving.peers import ALONE, BENTOML, EAGER, SERVERS, Batching, Peer
from benchmarks.serving.rayloom import Rayloom
from benchmarks.serving.workloads import Workload, workload

RAYLOOM, BATCHING_OFF, CHOSEN = "Rayloom", "Rayloom, batching off", "Rayloom, compile's choice"
SAME_FILE_LOOP, CHOSEN_LOOP = "bare loop, the same file", "bare loop, compile's choice"

_BATCHES = {BENTOML: Batching(max_size=16)}
_BATCH = Batching(max_size=16, wait_us=1000)
_OFF = ("serve.batching={max_batch_size: 1, timeout_us: 0}",)


@dataclass(frozen=True)
class Case:
    """One race."""

    title: str
    peers: Sequence[Peer]
    others: Sequence[Contender]
    workload: Workload
    loops: Mapping[str, Callable[[], float]]

    @property
    def contenders(self) -> list[Contender]:
        """All who take part."""
        return [*self.others, *self.peers]

    @property
    def peer_names(self) -> list[str]:
        """Those that Rayloom is compared with."""
        return [each.name for each in self.peers]


def tiny_cnn(models: Models, environments: Path) -> Case:
    """Of a model that takes no time, the server's own cost is measured."""
    return Case(
        "Tiny CNN",
        _peers(models.cnn, environments),
        [Rayloom(RAYLOOM, models.cnn)],
        workload(models.cnn.onnx, models.pictures),
        {SAME_FILE_LOOP: partial(best_rate, models.cnn, models.pictures)},
    )


def encoder(models: Models, environments: Path) -> Case:
    """Of a model that takes milliseconds, how much of the engine a server lets through, and what compile adds."""
    rows = models.short_texts
    return Case(
        "Sentence encoder, 32 tokens",
        _peers(models.encoder, environments),
        [
            Rayloom(RAYLOOM, models.encoder),
            Rayloom(BATCHING_OFF, models.encoder, _OFF),
            Rayloom(CHOSEN, models.chosen),
        ],
        workload(models.encoder.onnx, rows),
        {
            SAME_FILE_LOOP: partial(best_rate, models.encoder, rows),
            CHOSEN_LOOP: partial(best_rate, models.chosen, rows),
        },
    )


def texts(models: Models, environments: Path) -> Case:
    """The whole stack beside what a person writes first, on texts of every length."""
    return Case(
        "Sentence encoder, texts of every length",
        [Peer(EAGER, models.encoder, ALONE, environments)],
        [Rayloom(CHOSEN, models.chosen)],
        workload(models.encoder.onnx, models.texts),
        {},
    )


def _peers(model: ServedModel, environments: Path) -> list[Peer]:
    """Each server without batching and with it: which is faster depends on the model and on the load."""
    return [
        Peer(server, model, batching, environments)
        for server in SERVERS
        for batching in (ALONE, _BATCHES.get(server, _BATCH))
    ]


CASES: Mapping[str, Callable[[Models, Path], Case]] = {"cnn": tiny_cnn, "encoder": encoder, "texts": texts}
