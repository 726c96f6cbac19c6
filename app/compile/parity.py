"""Whether a model still answers as PyTorch does: the comparison, and the recipe's gates."""

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
"""What 90 of 100 less 89 of 100 is above 0.01."""


class Parity(BaseModel):
    """How an engine's answers compare with PyTorch's, over every row of the validation split."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")  # null would be no number when it is read

    accuracy: float
    max_difference: float
    """Of a logit, absolute."""
    cosine: float
    """Of a row's logits, the mean."""
    worst_cosine: float
    """Of the row whose logits are least like PyTorch's."""

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
    """A sentence for each gate that does not hold; a number that is none holds no gate.

    Args:
        accuracy: what is to be kept.
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
    """Refuse a file that takes or gives other tensors. Raises CompileError naming them."""
    if difference := given.difference(expected):
        raise CompileError(f"{str(path)!r} {difference}: export it with these, where -1 is a size that varies")
