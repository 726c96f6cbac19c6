"""How long a call takes, of all contenders in turn."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from app.errors import EngineError
from app.tensors import Tensors
from benchmarks.compile.contenders import EngineProcess, Open
from benchmarks.compile.models import Setting
from benchmarks.rounds import turns
from benchmarks.spread import Spread


@dataclass(frozen=True)
class Race:
    """The rounds of one model."""

    latencies: Mapping[Setting, Mapping[str, Spread]]
    """Milliseconds of a call by setting and contender; of each round the median."""

    absent: Mapping[str, str]
    """Contenders that do not run on this machine, and why."""

    def speed_up(self, setting: Setting, name: str, over: str) -> Spread:
        """Return how many times as fast one contender is as another, for each round."""
        return self.latencies[setting][over].over(self.latencies[setting][name])


def race(contenders: Mapping[str, Open], rows: Mapping[Setting, Tensors], threads: int, num_rounds: int) -> Race:
    """Time every contender at every setting, ``num_rounds`` times; each round begins with another contender.

    Args:
        rows: for each setting some rows of its length, which are repeated up to its batch size.
    """
    running, absent = {}, {}
    with ExitStack() as stack:
        for name, open_ in contenders.items():
            try:
                running[name] = stack.enter_context(EngineProcess(open_, threads, rows))
            except EngineError as error:
                absent[name] = str(error)
        rounds = [
            {
                (setting, name): running[name].latency_ms(setting, some)
                for setting, some in rows.items()
                for name in order
            }
            for order in turns(list(running), num_rounds)
        ]
    latencies = {
        setting: {name: Spread(tuple(round_[setting, name] for round_ in rounds)) for name in running}
        for setting in rows
    }
    return Race(latencies, absent)
