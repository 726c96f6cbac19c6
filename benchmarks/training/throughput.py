"""Steps per second and time to the first step, of Rayloom and its peers in turn."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.rounds import turns
from benchmarks.spread import Spread
from benchmarks.training.cases import Case, copy_corpus
from benchmarks.training.contenders import CONTENDERS, OURS, OURS_ON_RAY, Trial
from benchmarks.training.workload import Workload

Round = dict[str, Trial]
"""One run of each contender, one after the other."""


@dataclass(frozen=True)
class Comparison:
    """The rounds of one case."""

    case: Case
    preparation_s: float
    """Seconds to make tokens of the corpus, which Rayloom does in its run and the peers do not."""
    rounds: tuple[Round, ...]

    def steps_per_s(self, name: str) -> Spread:
        """Return the steps per second of one contender, after its start."""
        return Spread(tuple(round_[name].steps_per_s for round_ in self.rounds))

    def first_step_s(self, name: str) -> Spread:
        """Seconds from the command to the end of the first step."""
        return Spread(tuple(round_[name].first_step_s for round_ in self.rounds))

    def cpu_s_per_step(self, name: str) -> Spread:
        """CPU seconds a step of one contender, of all processes of the machine."""
        return Spread(tuple(trials[name].cpu_s_per_step for trials in self.rounds))

    def loss(self, name: str) -> float:
        """Mean loss over the steps after start-up."""
        return median(round_[name].mean_loss for round_ in self.rounds)

    def speed_ratio(self, peer: str, ours: str = OURS) -> Spread:
        """Our steps per second / the peer's, round by round."""
        return self.steps_per_s(ours).over(self.steps_per_s(peer))

    def start_ratio(self, peer: str, ours: str = OURS) -> Spread:
        """Our time to the first step / the peer's, round by round."""
        return self.first_step_s(ours).over(self.first_step_s(peer))

    def cpu_ratio(self, peer: str, ours: str = OURS) -> Spread:
        """Our CPU seconds a step / the peer's, round by round."""
        return self.cpu_s_per_step(ours).over(self.cpu_s_per_step(peer))

    def second_start_ratio(self, peer: str) -> Spread:
        """First step of the second job on a cluster / the peer's first step, round by round."""
        second = Spread(tuple(trials[OURS_ON_RAY].second_start_s or 0.0 for trials in self.rounds))
        return second.over(self.first_step_s(peer))

    def start_ratio_prepared(self, peer: str, ours: str = OURS) -> Spread:
        """The same without the time that preparing the data takes."""
        mine = Spread(tuple(seconds - self.preparation_s for seconds in self.first_step_s(ours).values))
        return mine.over(self.first_step_s(peer))


def compare(case: Case, num_rounds: int) -> Comparison:
    """Run every contender in turn, ``num_rounds`` times; each round begins with another."""
    with tempfile.TemporaryDirectory(prefix="bench-training-") as temporary:
        folder = Path(temporary)
        copy_corpus(folder)
        began = time.monotonic()
        work = case.workload(folder)
        preparation_s = time.monotonic() - began
        rounds = [
            {name: _run(name, case, work, folder) for name in order} for order in turns(list(CONTENDERS), num_rounds)
        ]
    return Comparison(case, preparation_s, tuple(rounds))


def _run(name: str, case: Case, work: Workload, folder: Path) -> Trial:
    """One run, or another one in place of a first that broke: gloo aborts now and then as a process ends."""
    try:
        trial = CONTENDERS[name](case, work, folder)
    except RuntimeError as error:
        print(f"{case.name}: {name}: run again, for: {error}", flush=True)
        trial = CONTENDERS[name](case, work, folder)
    print(
        f"{case.name}: {name}: first step after {trial.first_step_s:.1f} s, {trial.steps_per_s:.2f} steps/s", flush=True
    )
    return trial
