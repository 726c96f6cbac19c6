"""Compare an engine's answers with the right ones, and apply the recipe's gates."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict
from scipy.special import bdtrc

from app.compile.reference import BATCH, Judge, Reference, Tally
from app.config import ComputePrecision, GatesConfig
from app.engines.base import Engine, Signature
from app.errors import CompileError, EngineError, RequestError
from app.repository.score import ACCURACY, Score, Scored
from app.tensors import Tensors

_ROUNDING = 1e-9
"""Tolerance for rounding: 0.90 - 0.89 is slightly above 0.01 in floating point."""


_MAX_CHANCE, _CHANCE_TARGETS = 0.05, 2
"""The chance of as large a drop in a variant that is no worse, above which it is no reason to refuse."""


class Parity(Scored):
    """The comparison of an engine's answers with the right ones, over every row of the split."""

    # JSON's null could not be read back as a number.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    max_difference: float
    """The largest absolute difference of a number in a float output, such as a logit."""
    scaled_difference: float = 0.0
    """The largest one as a share of the magnitude of its column: the root mean square of the right numbers."""
    cosine: float
    """The mean cosine similarity of a row's outputs. With several float outputs, that of the least similar counts.

    Outputs of one number a row are left out, because the cosine of two numbers is only a sign.
    """
    worst_cosine: float
    """The lowest cosine similarity of a row's outputs."""
    differing_rows: float = 0.0
    """The share of rows in which an output of whole numbers, BOOL or strings differs."""
    relative_error: float = 0.0
    """The largest norm of a float output's differences over all rows, divided by the norm of the right numbers.

    Both are shares of the magnitude of their column, so that small columns count as much as large ones.
    """
    unjudged_error: float = 0.0
    """The same without the output that the score judges, unless it has one number a row."""
    lost: int | None = None
    """The number of targets that the right answers meet and the engine's do not; None if they are not counted."""
    gained: int | None = None
    """The number of targets that only the engine's answers meet."""

    def __str__(self) -> str:
        known = f"{self.score}, " if self.score else f"error {self.relative_error:.2%}, "
        differing = f", {self.differing_rows:.2%} of the rows differ in an exact output" if self.differing_rows else ""
        return f"{known}cosine {self.cosine:.5f}, largest difference {self.max_difference:.1e}{differing}"


def compare(engine: Engine, reference: Reference, max_rows: int = BATCH) -> Parity:
    """Run every row of the reference in batches of at most ``max_rows``, with one batch in memory at a time."""
    done, differing, cosine, worst_cosine = 0, 0, 0.0, np.inf
    tally = Tally(reference.judge)
    sums: defaultdict[str, _Sums] = defaultdict(_Sums)
    lost = gained = 0
    is_counted = False
    judged = reference.judge.output if reference.judge.metric else None
    for batch, expected in reference.batches(max_rows):
        _check_values(engine, batch.inputs)
        given = engine.run(batch.inputs)
        tally.add(given, batch)
        before, after = reference.judge.hits(expected, batch), reference.judge.hits(given, batch)
        if is_counted := before is not None and after is not None:
            lost, gained = lost + int((before & ~after).sum()), gained + int((after & ~before).sum())
        rows = len(next(iter(expected.values())))
        # Without a float output of several numbers, all rows count as similar.
        cosines = np.ones(rows)
        for name, ours, theirs in _float_outputs(given, expected):
            sums[name].add(ours, theirs, _flat(np.broadcast_to(reference.magnitudes[name], expected[name].shape)))
            if not sums[name].is_single:
                # Unlike ``min``, this propagates NaN.
                cosines = np.minimum(cosines, _cosines(ours, theirs))
        differing += int(_differing(given, expected, rows).sum())
        cosine += float(cosines.sum())
        worst_cosine = np.minimum(worst_cosine, cosines.min())
        done += rows
    return Parity(
        score=tally.score,
        max_difference=_largest([output.largest for output in sums.values()]),
        scaled_difference=_largest([output.scaled_difference for output in sums.values()]),
        cosine=cosine / done,
        worst_cosine=float(worst_cosine),
        differing_rows=differing / done,
        relative_error=_largest([output.relative_error for output in sums.values()]),
        unjudged_error=_largest(
            [output.relative_error for name, output in sums.items() if output.is_single or name != judged]
        ),
        lost=lost if is_counted else None,
        gained=gained if is_counted else None,
    )


def _check_values(engine: Engine, inputs: Tensors) -> None:
    """Raise EngineError if a value is outside the engine's range, such as the 32 bits of OpenVINO."""
    try:
        for spec in engine.signature.inputs:
            spec.check_values(inputs[spec.name])
    except RequestError as error:
        raise EngineError(f"{engine.name} does not take the rows: {error}").of(error.rule, error.key) from error


@dataclass
class _Sums:
    """The errors of an output over all rows, and the squares of both as shares of their column's magnitude."""

    errors: float = 0.0
    right: float = 0.0
    largest: float = 0.0
    """The largest error; NaN if any is."""
    scaled_difference: float = 0.0
    """The largest one as a share of its column's magnitude."""
    is_single: bool = True
    """Whether a row has one number."""

    def add(self, given: NDArray[np.float64], expected: NDArray[np.float64], magnitude: NDArray[np.float64]) -> None:
        difference = np.abs(given - expected)
        scaled = difference / magnitude
        self.errors += float(np.square(scaled).sum())
        self.right += float(np.square(expected / magnitude).sum())
        self.largest = float(np.maximum(self.largest, difference.max(initial=0.0)))
        self.scaled_difference = float(np.maximum(self.scaled_difference, scaled.max(initial=0.0)))
        self.is_single &= expected.shape[1] == 1

    @property
    def relative_error(self) -> float:
        # Relative to zeros, any error is infinite.
        return math.sqrt(self.errors / self.right) if self.right else math.inf if self.errors else 0.0


def _largest(errors: Sequence[float]) -> float:
    """Return the largest error; NaN if any is NaN."""
    return float(np.max(errors, initial=0.0))


def _float_outputs(given: Tensors, expected: Tensors) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.float64]]]:
    """Yield the name and both answers of each float output, of shape (rows, numbers)."""
    for name, output in expected.items():
        if _is_float(output):
            yield name, _flat(given[name]), _flat(output)


def _flat(output: NDArray[Any]) -> NDArray[np.float64]:
    return output.astype(np.float64).reshape(len(output), -1 if output.size else 0)


def _cosines(given: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine similarity of each row; 1 for equal rows, even of zeros."""
    cosines: NDArray[np.float64] = torch.cosine_similarity(torch.from_numpy(given), torch.from_numpy(expected)).numpy()
    return np.where((given == expected).all(axis=1), 1.0, cosines)


def _differing(given: Tensors, expected: Tensors, rows: int) -> NDArray[np.bool_]:
    """Return for each row whether an output differs that has to be equal."""
    differs = np.zeros(rows, np.bool_)
    for name, output in expected.items():
        if not _is_float(output):
            differs |= (given[name] != output).reshape(rows, -1).any(axis=1)
    return differs


def _is_float(output: NDArray[Any]) -> bool:
    return output.dtype.kind == "f"


def failures(
    parity: Parity,
    precision: ComputePrecision,
    to_keep: Score | None,
    judge: Judge,
    gates: GatesConfig,
    is_compared: bool = True,
) -> tuple[str, ...]:
    """Return a sentence for each failed gate. A NaN fails every gate.

    Args:
        to_keep: the score of the source model, from which the drop is counted. None if it is unknown.
        is_compared: whether it is the score of the answers that ``parity`` compares with.
    """
    found = []
    # Each condition is negated, because every comparison with NaN is false.
    is_equal = precision == "fp32" and parity.scaled_difference <= gates.max_difference
    if precision == "fp32" and not is_equal:
        found.append(
            f"the largest difference is {parity.scaled_difference:.1e} of the magnitude of its column, and no number "
            f"differs by more than {parity.max_difference:.1e}: compile.gates.max_difference is {gates.max_difference}"
        )
    if (
        to_keep
        and parity.score
        and not (drop := judge.drop(to_keep, parity.score)) <= gates.max_accuracy_drop + _ROUNDING
        # An error near 0 rises by a large share at the least rounding.
        and not (is_compared and ((is_equal and to_keep.mode == "min") or _is_chance(parity, drop, gates)))
    ):
        found.append(_drop_refused(to_keep, parity.score, gates))
    if not parity.differing_rows <= gates.max_accuracy_drop + _ROUNDING:
        found.append(
            f"an output of whole numbers, BOOL or strings differs in {parity.differing_rows:.2%} of the rows: "
            f"compile.gates.max_accuracy_drop is {gates.max_accuracy_drop}"
        )
    if not parity.cosine >= gates.min_cosine:
        found.append(f"the mean cosine is {parity.cosine:.4f}: compile.gates.min_cosine is {gates.min_cosine}")
    # In fp32, the largest difference is stricter. Logits that an accuracy judges may be scaled without harm.
    is_whole = parity.score is None and precision != "fp32"
    error = parity.relative_error if is_whole else parity.unjudged_error
    # An error at right angles to the right numbers gives just this cosine.
    if not error <= (limit := math.sqrt(1.0 - gates.min_cosine**2)) + _ROUNDING:
        found.append(
            f"the relative error is {error:.2%}: compile.gates.min_cosine is {gates.min_cosine}, which allows "
            f"{limit:.2%}"
        )
    return tuple(found)


def _is_chance(parity: Parity, drop: float, gates: GatesConfig) -> bool:
    """Return whether a drop of the accuracy may be chance: it is small, and no sign test finds it.

    It is small if at most ``_CHANCE_TARGETS`` more are lost than the gate allows. The test is McNemar's. A gate that
    allows no drop allows none by chance.
    """
    if parity.lost is None or parity.gained is None or not gates.max_accuracy_drop:
        return False
    changed, net = parity.lost + parity.gained, parity.lost - parity.gained
    is_small = net - net * gates.max_accuracy_drop / drop <= _CHANCE_TARGETS
    # The probability of as many losses or more. scipy.stats, which has the whole test, takes a second to import.
    return bool(changed and is_small and bdtrc(parity.lost - 1, changed, 0.5) > _MAX_CHANCE)


def _drop_refused(before: Score, after: Score, gates: GatesConfig) -> str:
    name, falls = before.metric.replace("_", " "), before.mode == "max"
    limited = f"the fall of {name}" if falls else f"the rise of {name} as a share of it"
    meaning = "" if before.metric == ACCURACY else f", which limits {limited}"
    return (
        f"the {name} {'falls' if falls else 'rises'} from {before.value:.4f} to {after.value:.4f}: "
        f"compile.gates.max_accuracy_drop is {gates.max_accuracy_drop}{meaning}"
    )


def check_signature(given: Signature, expected: Signature, path: Path) -> None:
    """Raise CompileError if a file has other inputs or outputs than expected, and name them."""
    if difference := given.difference(expected):
        raise CompileError(f"{str(path)!r} {difference}: export it with these, where -1 is a size that varies").of(
            "file.other_tensors"
        )
