"""Fit the planner's rates and memory on the tuning split of the published runs: python -m benchmarks.planning.fit

It prints the values that ``app/planner/rates.py`` and ``app/planner/memory.py`` hold. Each is bounded by what the
hardware can do.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, linprog

from app.planner.memory import ProcessMemory
from app.planner.rates import Rates
from benchmarks.planning.published import published_runs

_MAX_TOO_LOW = 0.05
_BOUNDS: dict[str, tuple[float, float, float]] = {
    "matmul": (0.6, 0.84, 0.92),  # cuBLAS reaches 0.8 to 0.9 of an A100's peak on large products
    "attention": (0.3, 0.54, 0.75),  # FlashAttention 2: 0.5 to 0.73 on A100 (arXiv:2307.08691)
    "h100.matmul": (0.5, 0.66, 0.85),  # its power limit comes before its peak
    "h100.attention": (0.25, 0.28, 0.75),  # FlashAttention 2: 0.35 on H100 (arXiv:2407.08608)
    "scores": (0.2, 0.6, 0.8),  # narrow batched products
    "memory": (0.6, 0.9, 0.92),  # what a copy reaches
    "node_link": (0.5, 0.84, 0.85),  # NCCL's tests: 230 to 250 of 300 GB/s
    "network": (0.5, 0.83, 0.92),
    "overlap": (0.6, 0.62, 1.0),
    "launches": (0.3, 5.0, 6.0),
}
"""The least, a start and the most of each rate."""


def main() -> None:
    """Fit, and print each rate, marked where a bound holds it."""
    runs = [run for run in published_runs() if not run.is_held_out]
    counts = Counter(run.source for run in runs)
    weights = np.array([counts[run.source] ** -0.5 for run in runs])  # each source counts alike

    def residuals(values: Sequence[float]) -> NDArray[np.float64]:
        ampere, hopper = _rates(values)
        logs = [
            np.log(run.estimate(hopper if run.device.name.startswith("h100") else ampere).step_s / run.step_s)
            for run in runs
        ]
        return np.asarray(logs, dtype=np.float64) * np.asarray(weights, dtype=np.float64)

    lower, start, upper = zip(*_BOUNDS.values(), strict=True)
    found = least_squares(
        residuals, start, bounds=(lower, upper), loss="soft_l1", f_scale=0.05 * weights.mean(), diff_step=1e-3
    )
    for name, value, low, high in zip(_BOUNDS, found.x, lower, upper, strict=True):
        at_bound = "  at its bound" if min(value - low, high - value) < 1e-3 * (high - low) else ""
        print(f"{name:16} {value:.3f}{at_bound}")
    fragmentation, group = fit_memory()
    print(f"fragmentation    {fragmentation:.3f}\ngroup            {group / 1e9:.2f} GB")


def fit_memory() -> tuple[float, float]:
    """Return the share of fragmentation and the bytes of a process group that the memory of published runs shows.

    The absolute errors are as small as can be while no run is predicted to take over 5 % too little: a plan that does
    not fit is worse than one that is refused. All tuning runs are in as many groups, so that a group's bytes also hold
    whatever else is the same for all of them.
    """
    runs = [run for run in published_runs() if run.memory and not run.is_held_out]
    measured = np.array([run.memory for run in runs])
    none, some = ProcessMemory(group=0.0, fragmentation=0.0), {"group": 1e9, "fragmentation": 1.0}
    known = np.array([run.memory_estimate(none) for run in runs])
    changed = [replace(none, **{key: step}) for key, step in some.items()]
    slopes = np.array([[run.memory_estimate(process) for process in changed] for run in runs]) - known[:, None]
    shares, missing = slopes / measured[:, None], 1 - known / measured
    unit = np.eye(len(runs))
    found = linprog(
        np.concatenate([[0, 0], np.ones(len(runs))]),  # the sum of errors
        A_ub=np.block([[shares, -unit], [-shares, -unit], [-shares, 0 * unit]]),
        b_ub=np.concatenate([missing, -missing, _MAX_TOO_LOW - missing]),
        bounds=[(0, 3), (0, 0.3)] + [(0, None)] * len(runs),
    )
    group, fragmentation = found.x[:2]
    return float(fragmentation), float(group * some["group"])


def _rates(values: Sequence[float]) -> tuple[Rates, Rates]:
    """Return the rates of Ampere and of Hopper."""
    named = dict(zip(_BOUNDS, values, strict=True))
    shared = {name: value for name, value in named.items() if not name.startswith("h100.")}
    hopper = shared | {"matmul": named["h100.matmul"], "attention": named["h100.attention"]}
    return Rates(**shared), Rates(**hopper)


if __name__ == "__main__":
    main()
