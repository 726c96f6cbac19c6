"""What clients send that mean no good, or do not know better."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e39, 1e308, float("nan"), float("inf"),
    "", "x", "é" * 100, "FP32", "BYTES", "BOOL", "\ud800", [], {}, [[]], [[[1]]], [1, [2]], [None], [2**62, 2**62],
    [0, 2**62], [1] * 100, [-1], ["1"], [{}], {"binary_data_size": 2**62}, {"binary_data_size": -1},
    {"shared_memory_region": "r"}, {"sequence_id": []},
]  # fmt: skip
LENGTHS = ["", "0", "-1", "1", "99999999999999999999", "1e3", "²", " 7", "0x10", "+5", "5" * 5000]
"""What a header may say that is a length."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value that something can be put in."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def put_something(body: dict[str, Any], rng: random.Random) -> bytes:
    """The body in JSON, with something in up to two places that does not belong there, or without it."""
    changed = json.loads(json.dumps(body))
    for _ in range(rng.randint(0, 2)):
        holder, key = rng.choice(list(places(changed)))
        if rng.random() < 0.2:
            del holder[key]
            break
        holder[key] = deepcopy(rng.choice(NASTY))
    return json.dumps(changed, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, repeat, replace or leave some bytes."""
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2)) if data else (0, 0)
    match rng.randrange(6):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:]
        case 3:
            return data[:start] + rng.randbytes(end - start) + data[end:]
        case 4 if data:
            return data[: start or 1][:-1] + bytes([rng.randrange(256)]) + data[start or 1 :]
        case _:
            return data
