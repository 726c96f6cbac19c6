"""Who is measured when: what is compared takes turns, so that a machine that slows down slows all of it."""

from collections.abc import Iterator, Sequence


def turns(names: Sequence[str], num_rounds: int) -> Iterator[list[str]]:
    """The order of each round; each begins with another name."""
    for number in range(num_rounds):
        yield [names[(number + place) % len(names)] for place in range(len(names))]
