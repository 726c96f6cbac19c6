"""What it costs to leave memory free for predictions that are too low."""

from dataclasses import dataclass

from app.config.plan_rules import Setting
from app.planner.cluster import cluster_of
from app.planner.search import Findings, Problem, search
from benchmarks.markdown import table
from benchmarks.planning.published import EARLIER_TABLE, LATER_TABLE, PublishedRun, published_runs
from benchmarks.planning.transformer import TransformerShape, transformer_profile

_MARGINS = (0.0, 0.04, 0.08, 0.3)
_TOLERATED = 0.08
_TEXT = """\
The planner's plan may fill a device to the last byte. With a margin, a plan must also fit if it needs that much more
memory than predicted. The first columns count published runs, including those that were not in the table. The other
columns are searches on A100 with 80 GB. They show how much slower the fastest plan is that still fits, and how many
plans fit."""


@dataclass(frozen=True)
class _Case:
    """A model on devices, with samples of 2,048 tokens."""

    title: str
    devices: int
    global_batch: int
    layers: int
    hidden: int
    heads: int

    @property
    def problem(self) -> Problem:
        shape = TransformerShape(
            self.layers, self.hidden, self.heads, 51200, 2048, 4 * self.hidden, self.heads, split_vocabulary=False
        )
        profile = transformer_profile(self.title, shape)
        setting = Setting((self.devices, self.devices), "bf16", "gpu", "adamw", profile.traits, ("input_ids",))
        return Problem(profile, cluster_of(f"{self.devices}xa100-80"), setting, self.global_batch)


GPT3 = _Case("175 B on 1,024", 1024, 1536, layers=96, hidden=12288, heads=96)
_CASES = (
    GPT3,
    _Case("175 B on 512", 512, 1536, layers=96, hidden=12288, heads=96),
    _Case("18 B on 64", 64, 512, layers=40, hidden=6144, heads=48),
    _Case("7 B on 8", 8, 128, layers=32, hidden=4096, heads=32),
)


def safety_section() -> str:
    """Return the table of margins."""
    shares = [run.memory / run.memory_estimate() for run in _measured() if run.memory]
    searches = [(case.problem, search(case.problem)) for case in _CASES]
    rows = [
        [
            f"{margin:.0%}",
            *(
                f"{sum(share > (1 + margin) * limit for share in shares)} of {len(shares)}"
                for limit in (1.0, 1 / (1 - _TOLERATED))
            ),
            *(_slower(problem, found, margin) for problem, found in searches),
        ]
        for margin in _MARGINS
    ]
    header = ["margin", "too low", f"by more than {_TOLERATED:.0%}", *(case.title for case in _CASES)]
    return f"{_TEXT}\n\n{table(header, rows)}"


def _measured() -> list[PublishedRun]:
    return [*published_runs(), *published_runs(LATER_TABLE), *published_runs(EARLIER_TABLE)]


def _slower(problem: Problem, found: Findings, margin: float) -> str:
    """Return how much slower the fastest plan is that fits with the margin, and how many fit."""
    limit = problem.cluster.device.memory / (1 + margin)
    times = [candidate.step_s for candidate in found.candidates if candidate.memory.total <= limit]
    fastest = min(candidate.step_s for candidate in found.candidates)
    return f"{min(times) / fastest - 1:+.1%}, {len(times)} plans"
