"""The sweep as a picture: a panel for each preferred size, a field for each largest size and delay."""

from collections.abc import Iterator, Mapping

from benchmarks.serving.sweep import Outcome, Setting

_WIDTH, _HEIGHT = 92, 40
_LEFT, _TOP = 84, 64
_GAP = 36


def heat_map(found: Mapping[Setting, Outcome]) -> str:
    """An SVG file: rows a second with many connections as colour and number, milliseconds of one alone below it."""
    panels = sorted({item.preferred for item in found}, key=lambda size: size or 0)
    sizes, delays = sorted({item.max_size for item in found}), sorted({item.delay_us for item in found})
    panel = _LEFT + _WIDTH * len(delays) + _GAP
    width, height = panel * len(panels), _TOP + _HEIGHT * len(sizes) + 48
    most = max(item.rate for item in found.values())
    body = [
        part
        for number, preferred in enumerate(panels)
        for part in _panel(found, preferred, sizes, delays, panel * number, most)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12" text-anchor="middle">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(
    found: Mapping[Setting, Outcome], preferred: int | None, sizes: list[int], delays: list[int], left: int, most: float
) -> Iterator[str]:
    middle = left + _LEFT + _WIDTH * len(delays) // 2
    title = "no preferred size" if preferred is None else f"preferred size {preferred}"
    yield f'<text x="{middle}" y="24" font-size="15">{title}</text>'
    bottom = _TOP + _HEIGHT * len(sizes)
    yield f'<text x="{middle}" y="{bottom + 36}">delay, µs</text>'
    yield f'<text x="{left + 42}" y="{_TOP - 12}">largest size</text>'
    for column, delay in enumerate(delays):
        yield f'<text x="{_x(left, column)}" y="{bottom + 18}">{delay}</text>'
    for row, size in enumerate(sizes):
        y = _TOP + _HEIGHT * row
        yield f'<text x="{left + 62}" y="{y + 24}">{size}</text>'
        for column, delay in enumerate(delays):
            if (outcome := found.get(Setting(size, delay, preferred))) is not None:
                yield from _field(_x(left, column), y, outcome, outcome.rate / most)


def _field(x: int, y: int, outcome: Outcome, share: float) -> Iterator[str]:
    ink = "white" if share > 0.6 else "black"
    colour = f"rgb({round(235 - 205 * share)},{round(243 - 150 * share)},{round(252 - 90 * share)})"
    corner = f'x="{x - _WIDTH // 2 + 1}" y="{y + 1}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}"'
    yield f'<rect {corner} fill="{colour}"/>'
    yield f'<text x="{x}" y="{y + 17}" fill="{ink}">{outcome.rate:.0f}/s</text>'
    yield f'<text x="{x}" y="{y + 33}" fill="{ink}" font-size="10">{outcome.alone_ms:.1f} ms alone</text>'


def _x(left: int, column: int) -> int:
    return left + _LEFT + _WIDTH * column + _WIDTH // 2
