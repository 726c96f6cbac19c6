"""Compare an engine's answers with PyTorch's, and apply the recipe's gates."""

from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from app.compile.reference import BATCH, Reference
from app.config import ComputePrecision, GatesConfig
from app.engines.base import Engine, Signature
from app.errors import CompileError
from app.tensors import OUTPUT

_ROUNDING = 1e-9
"""Tolerance for rounding: 0.90 - 0.89 is slightly above 0.01 in floating point."""


class Parity(BaseModel):
    """The comparison of an engine's answers with PyTorch's, over every row of the validation split."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")  # JSON null could not be read back as a number

    accuracy: float
    max_difference: float
    """The largest absolute difference of a logit."""
    cosine: float
    """The mean cosine similarity of a row's logits."""
    worst_cosine: float
    """The lowest cosine similarity of a row's logits."""

    def __str__(self) -> str:
        return f"accuracy {self.accuracy:.4f}, cosine {self.cosine:.5f}, largest difference {self.max_difference:.1e}"


def compare(engine: Engine, reference: Reference, max_rows: int = BATCH) -> Parity:
    """Run every row of the reference in batches of at most ``max_rows``, with one batch in memory at a time."""
    done, right, cosine, worst_cosine, max_difference = 0, 0, 0.0, np.inf, 0.0
    for batch in reference.rows.batches(max_rows):
        given = engine.infer(batch.inputs)[OUTPUT].astype(np.float64)
        expected = reference.logits[done : done + len(given)].astype(np.float64)
        cosines = torch.cosine_similarity(torch.from_numpy(given), torch.from_numpy(expected)).numpy()
        right += int((given.argmax(-1) == batch.targets).sum())
        cosine += float(cosines.sum())
        worst_cosine = np.minimum(worst_cosine, cosines.min())  # unlike min, it propagates NaN
        max_difference = np.maximum(max_difference, np.abs(given - expected).max())
        done += len(given)
    return Parity(
        accuracy=right / done,
        max_difference=float(max_difference),
        cosine=cosine / done,
        worst_cosine=float(worst_cosine),
    )


def failures(parity: Parity, precision: ComputePrecision, accuracy: float, gates: GatesConfig) -> tuple[str, ...]:
    """Return a sentence for each failed gate. A NaN fails every gate.

    Args:
        accuracy: the accuracy of the trained model, from which the drop is counted.
    """
    found = []
    if precision == "fp32" and not parity.max_difference <= gates.max_difference:
        found.append(
            f"the largest difference is {parity.max_difference:.1e}: compile.gates.max_difference is "
            f"{gates.max_difference}"
        )
    if not accuracy - parity.accuracy <= gates.max_accuracy_drop + _ROUNDING:
        found.append(
            f"the accuracy falls from {accuracy:.4f} to {parity.accuracy:.4f}: compile.gates.max_accuracy_drop is "
            f"{gates.max_accuracy_drop}"
        )
    if not parity.cosine >= gates.min_cosine:
        found.append(f"the mean cosine is {parity.cosine:.4f}: compile.gates.min_cosine is {gates.min_cosine}")
    return tuple(found)


def check_signature(given: Signature, expected: Signature, path: Path) -> None:
    """Raise CompileError if a file has other inputs or outputs than expected, and name them."""
    if difference := given.difference(expected):
        raise CompileError(f"{str(path)!r} {difference}: export it with these, where -1 is a size that varies")
