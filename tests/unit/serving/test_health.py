"""Health checks of idle engines: which engines are probed, and how often."""

import asyncio

from app.serving.model.health import EngineHealth, choose_probes

ENGINES = 20


class Clock:
    """A clock that each blank request advances by ``blank_s``."""

    def __init__(self, blank_s: float) -> None:
        self.now_s, self.blank_s = 0.0, blank_s

    def __call__(self) -> float:
        return self.now_s

    def run_probe(self) -> None:
        self.now_s += self.blank_s


def blanks_in_each_look(blank_s: float, looks: int) -> list[int]:
    """Return how many of ``ENGINES`` idle engines are probed in each round, one second apart."""

    async def scenario() -> list[int]:
        clock, asked = Clock(blank_s), []
        engines = [EngineHealth(clock.run_probe, clock) for _ in range(ENGINES)]
        for _ in range(looks):
            clock.now_s += 1
            chosen = choose_probes(engines)
            for engine in engines:
                await engine.check(0.0, may_probe=engine in chosen)
            asked.append(len(chosen))
        assert all(engine.answered_s > 0 for engine in engines), "each was asked"
        return asked

    return asyncio.run(scenario())


def test_engines_that_answer_at_once_are_all_asked_every_few_seconds() -> None:
    assert sum(blanks_in_each_look(0.0, 13)) == 2 * ENGINES


def test_blank_requests_take_a_tenth_of_a_second_of_each_look() -> None:
    asked = blanks_in_each_look(0.06, 30)
    assert set(asked[asked.index(ENGINES) + 1 :]) <= {0, 1, 2}, "once it is known how long they take"
    assert blanks_in_each_look(10.0, 30)[-1] == 1, "one at least"
