"""Whether a model still answers as PyTorch does: the comparison, and the recipe's gates."""

from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from app.compile.subject import BATCH, Reference
from app.config import ComputePrecision, GatesConfig
from app.engines.base import Engine, Signature
from app.errors import CompileError
from app.serving.batching.together import infer_together
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


def compare(engine: Engine, reference: Reference, most_rows: int = BATCH) -> Parity:
    """Run every row of the reference, ``most_rows`` at once at most."""
    logits = [answer[OUTPUT] for answer in infer_together(engine, reference.inputs, most_rows)]
    given, expected = (torch.from_numpy(np.concatenate(each)).double() for each in (logits, reference.logits))
    cosines = torch.cosine_similarity(given, expected)
    return Parity(
        accuracy=reference.accuracy_of(logits),
        max_difference=float((given - expected).abs().max()),
        cosine=float(cosines.mean()),
        worst_cosine=float(cosines.min()),
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
