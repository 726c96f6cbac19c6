"""Models of the tests' own, that draw random numbers, linger, hang, slow down or break where they are told to."""

import hashlib
import os
import random
import signal
import time
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from app.models.gpt import GPT
from app.models.image import SmallCnn


class DropoutCnn(nn.Module):
    """A small network that draws from the generators of torch, Python and NumPy, unless ``dropout`` is 0.

    It takes at least ``pause_s`` seconds for a batch of training.

    Each rank writes the id of its process into the folder ``ranks``, if there is one.
    """

    def __init__(
        self,
        num_labels: int,
        channels: int,
        width: int = 32,
        dropout: float = 0.2,
        pause_s: float = 0.0,
        ranks: str = "",
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.network = SmallCnn(num_labels, channels, width)
        self.pause_s, self.ranks = pause_s, ranks

    def forward(self, pixel_values: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():  # without gradients, its operations are counted
            self.note_rank()
            self.trouble(pixel_values)
        logits: Tensor = self.network(self.dropout(pixel_values))
        if not self.training or self.dropout.p == 0:
            return logits
        return logits * random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1)

    def note_rank(self) -> None:
        if self.ranks:
            (Path(self.ranks) / str(torch.distributed.get_rank())).write_text(str(os.getpid()), encoding="utf-8")
            self.ranks = ""

    def trouble(self, pixel_values: Tensor) -> None:
        """What this model does beside its work in each forward pass of training."""
        time.sleep(self.pause_s)


class OneRankCnn(DropoutCnn):
    """One that fails in the second rank."""

    def trouble(self, pixel_values: Tensor) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ValueError("this rank has a broken disk")


class FlickeringCnn(SmallCnn):
    """One whose first validation has no number."""

    def __init__(self, num_labels: int, channels: int, width: int) -> None:
        super().__init__(num_labels, channels, width)
        self.validated, self.is_validating = False, False

    def forward(self, pixel_values: Tensor) -> Tensor:
        self.validated |= self.training and self.is_validating
        self.is_validating = not self.training
        logits: Tensor = super().forward(pixel_values)
        return logits if self.training or self.validated else logits * torch.nan


class FrozenNormCnn(SmallCnn):
    """A CNN behind a batch norm that is frozen in evaluation mode."""

    def __init__(self, num_labels: int, channels: int, width: int) -> None:
        super().__init__(num_labels, channels, width)
        self.norm = nn.BatchNorm2d(channels).requires_grad_(False).eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(self.norm(pixel_values))


class MuteCnn(SmallCnn):
    """One whose validations have no number."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = super().forward(pixel_values)
        return logits if self.training else logits * torch.nan


class HangingCnn(DropoutCnn):
    """One that never comes back from a forward pass on ``rank``, once in the life of file ``once``."""

    def __init__(
        self, num_labels: int, channels: int, width: int, rank: int, call: int, once: str, ranks: str = ""
    ) -> None:
        super().__init__(num_labels, channels, width, ranks=ranks)
        self.rank, self.call, self.once, self.calls = rank, call, Path(once), 0

    def trouble(self, pixel_values: Tensor) -> None:
        self.calls += 1
        if torch.distributed.get_rank() == self.rank and self.calls == self.call and not self.once.exists():
            self.once.write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(1e6)


def slow_gpt(vocab_size: int, max_length: int, pause_s: float) -> GPT:
    """A small GPT that takes at least ``pause_s`` seconds for a batch."""
    model = GPT(vocab_size, max_length, layers=1, width=16, heads=2)
    model.norm.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
    return model


def hanging_gpt(vocab_size: int, max_length: int, rank: int, call: int, once: str) -> GPT:
    """A GPT that never comes to its last layer on ``rank``, in one forward pass; as ``HangingCnn`` otherwise."""
    model, calls = GPT(vocab_size, max_length, layers=2, width=32, heads=2), count(1)

    def trouble(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        here = norm.training and torch.is_grad_enabled() and torch.distributed.get_rank() == rank
        if here and next(calls) == call and not Path(once).exists():
            Path(once).write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(1e6)

    model.norm.register_forward_pre_hook(trouble)
    return model


class SkippingCnn(DropoutCnn):
    """One that exchanges twice in a forward pass, but on ``rank`` skips the first exchange of the pass ``call``."""

    def __init__(self, num_labels: int, channels: int, width: int, rank: int, call: int) -> None:
        super().__init__(num_labels, channels, width)
        self.rank, self.call, self.calls = rank, call, 0
        self.groups: list[torch.distributed.ProcessGroup] = []

    def trouble(self, pixel_values: Tensor) -> None:
        if pixel_values.is_meta:
            return  # the first rank alone counts operations
        self.groups = self.groups or [torch.distributed.new_group() for _ in range(2)]
        self.calls += 1
        skips = torch.distributed.get_rank() == self.rank and self.calls == self.call
        for group in self.groups[skips:]:
            torch.distributed.all_reduce(torch.zeros(1), group=group)


class DyingCnn(DropoutCnn):
    """One whose second rank kills itself in forward pass ``deaths[n]`` of its n-th life.

    The files ``life_n`` and ``death_n`` in ``folder`` tell when a life trained first, and when it ended.
    """

    def __init__(
        self, num_labels: int, channels: int, width: int, pause_s: float, deaths: list[int], folder: str
    ) -> None:
        super().__init__(num_labels, channels, width, pause_s=pause_s)
        self.deaths, self.folder, self.calls = deaths, Path(folder), 0

    def trouble(self, pixel_values: Tensor) -> None:
        super().trouble(pixel_values)
        if torch.distributed.get_rank() != 1:
            return
        life = len(list(self.folder.glob("death_*")))
        self.calls += 1
        if self.calls == 1:
            (self.folder / f"life_{life}").touch()
        if life < len(self.deaths) and self.calls == self.deaths[life]:
            (self.folder / f"death_{life}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class SlowCnn(DropoutCnn):
    """One that takes ``extra_s`` seconds longer on ``rank``."""

    def __init__(self, num_labels: int, channels: int, width: int, rank: int, extra_s: float) -> None:
        super().__init__(num_labels, channels, width)
        self.rank, self.extra_s = rank, extra_s

    def trouble(self, pixel_values: Tensor) -> None:
        time.sleep(self.extra_s * (torch.distributed.get_rank() == self.rank))


class PoisonedCnn(DropoutCnn):
    """One that answers NaN to a batch with a picture whose fingerprint is in ``poison``."""

    def __init__(self, num_labels: int, channels: int, width: int, poison: list[str]) -> None:
        super().__init__(num_labels, channels, width)
        self.poison = set(poison)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits = super().forward(pixel_values)
        return logits * float("nan") if self.training and self.poison & set(fingerprints(pixel_values)) else logits


class SteepCnn(PoisonedCnn):
    """One whose loss stays finite for such a batch, and whose gradient does not."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = DropoutCnn.forward(self, pixel_values)
        poisoned = self.training and self.poison & set(fingerprints(pixel_values))
        return logits + (logits - logits).sqrt() if poisoned else logits


class InfiniteCnn(PoisonedCnn):
    """One whose loss of such a batch is infinite, while its gradient is finite: it rules a right answer out."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = DropoutCnn.forward(self, pixel_values)
        poisoned = self.training and self.poison & set(fingerprints(pixel_values))
        first = torch.arange(logits.shape[-1]) == 0
        return logits.masked_fill(first, -torch.inf) if poisoned else logits


class LoudCnn(DropoutCnn):
    """One whose logits are so large that in fp16 its gradient overflows until the loss scale has fallen."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return 256.0 * super().forward(pixel_values)


class LedgerCnn(DropoutCnn):
    """One that notes in ``folder`` which pictures it was trained on: a file a process, a line a picture."""

    def __init__(self, num_labels: int, channels: int, width: int, folder: str, pause_s: float = 0.0) -> None:
        super().__init__(num_labels, channels, width, dropout=0.0, pause_s=pause_s)
        self.folder = Path(folder)

    def trouble(self, pixel_values: Tensor) -> None:
        super().trouble(pixel_values)
        with (self.folder / str(os.getpid())).open("a", encoding="utf-8") as file:
            file.writelines(f"{fingerprint}\n" for fingerprint in fingerprints(pixel_values))


class LedgerText(nn.Module):
    """A bag of tokens that notes in ``folder`` which texts it was trained on: a file a process, a line a text."""

    def __init__(self, num_labels: int, vocab_size: int, folder: str, pause_s: float = 0.0) -> None:
        super().__init__()
        self.folder, self.pause_s = Path(folder), pause_s
        self.embedding, self.head = nn.Embedding(vocab_size, 32), nn.Linear(32, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            time.sleep(self.pause_s)
            with (self.folder / str(os.getpid())).open("a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in text_fingerprints(input_ids, attention_mask))
        mask = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        logits: Tensor = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return logits


def text_fingerprints(input_ids: Tensor, attention_mask: Tensor) -> list[str]:
    """A short name for each text, from its tokens without their padding."""
    rows = zip(input_ids.detach().cpu(), attention_mask.detach().cpu(), strict=True)
    return [hashlib.sha256(ids[mask.bool()].numpy().tobytes()).hexdigest()[:16] for ids, mask in rows]


def fingerprints(pixel_values: Tensor) -> list[str]:
    """A short name for each picture, from its pixels."""
    pictures = pixel_values.detach().cpu().float().numpy()
    return [hashlib.sha256(picture.tobytes()).hexdigest()[:16] for picture in pictures]


class CountingText(nn.Module):
    """One that counts in a buffer how often it was trained on each text of four tokens.

    Checkpoints keep the buffer, so it tells which texts are in the weights, whatever was killed in between. Ranks keep
    the mean of their buffers: each counts a text as often as there are ranks.
    """

    seen: Tensor

    def __init__(self, vocab_size: int, num_labels: int, pause_s: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(vocab_size, 16), nn.Linear(64, num_labels)
        self.vocab_size, self.pause_s = vocab_size, pause_s
        self.register_buffer("seen", torch.zeros(vocab_size**4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        digits = input_ids[:, 1:5]
        if self.training and torch.is_grad_enabled():
            time.sleep(self.pause_s)
            ranks = float(torch.distributed.get_world_size())
            self.seen.index_add_(0, ledger_places(digits, self.vocab_size), torch.full((len(digits),), ranks))
        logits: Tensor = self.output(self.tokens(digits).flatten(1))
        return logits


def ledger_places(digits: Tensor, vocab_size: int) -> Tensor:
    """The place in the ledger of each text, from its four tokens."""
    return (digits * vocab_size ** torch.arange(4)).sum(dim=1)


class WideMlp(nn.Module):
    """One whose matrices are large, and begin where ``width`` says; a batch takes ``pause_s`` seconds at least."""

    def __init__(self, num_labels: int, channels: int, width: int, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        first = nn.Linear(64 * channels, width)
        self.layers = nn.Sequential(
            nn.Flatten(), first, nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_labels)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        logits: Tensor = self.layers(pixel_values)
        return logits
