"""Steps a second by the network's rate, as a picture: both axes are logarithmic."""

import math
from collections.abc import Iterator, Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND = 460, 300, 64, 24, 200
_INKS = ("#1b6ca8", "#5fa8d3", "#b04a2f", "#e08e6d", "#7a5195", "#7fb069", "#3e8e41", "#1f4d2b")


def lines(columns: Sequence[str], rates: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG file with a line for each case, and a place on the horizontal axis for each column."""
    values = [value for row in rates.values() for value in row]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(number: int) -> float:
        return _LEFT + _WIDTH * (number + 0.5) / len(columns)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(value)) / (high - low)

    def body() -> Iterator[str]:
        for power in range(low, high + 1):
            yield f'<path d="M{_LEFT} {y(10**power):.0f}h{_WIDTH}" stroke="#ddd"/>'
            yield f'<text x="{_LEFT - 8}" y="{y(10**power) + 4:.0f}" text-anchor="end">{10**power:g}</text>'
        for number, column in enumerate(columns):
            yield f'<text x="{x(number):.0f}" y="{_TOP + _HEIGHT + 20}" text-anchor="middle">{column}</text>'
        for place, (name, row) in enumerate(rates.items()):
            ink = _INKS[place % len(_INKS)]
            points = " ".join(f"{x(number):.0f},{y(value):.1f}" for number, value in enumerate(row))
            yield f'<polyline points="{points}" fill="none" stroke="{ink}" stroke-width="2"/>'
            right, height = _LEFT + _WIDTH + 16, _TOP + 16 + 22 * place
            yield f'<path d="M{right} {height - 4}h20" stroke="{ink}" stroke-width="2"/>'
            yield f'<text x="{right + 26}" y="{height}">{name}</text>'

    width, height = _LEFT + _WIDTH + _LEGEND + 32, _TOP + _HEIGHT + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            '<text x="8" y="14">steps/s</text>',
            *body(),
            "</svg>\n",
        ]
    )
