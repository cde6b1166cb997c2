"""Curves as SVG, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 640, 400, 64
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")

Points = Sequence[tuple[float, float]]


class _Axis:
    """Maps values to pixels, linearly or by their logarithm."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], log: bool) -> None:
        self.log, self.pixels = log, pixels
        low, high = self._scaled(min(values)), self._scaled(max(values))
        if low == high:
            low, high = low - 0.5, high + 0.5
        self.low, self.high = low, high

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def widened(self) -> "_Axis":
        """Down to zero, or out to powers of ten."""
        if self.log:
            self.low, self.high = math.floor(self.low), math.ceil(self.high)
        else:
            self.low = min(self.low, 0.0)
        return self

    def __call__(self, value: float) -> float:
        start, end = self.pixels
        return start + (self._scaled(value) - self.low) / (self.high - self.low) * (end - start)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1)]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first, last + 1)]


def plot(
    title: str,
    x_label: str,
    y_label: str,
    curves: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    dots: bool = True,
) -> str:
    """An SVG picture of `curves` with a legend; a logarithmic x axis is marked at the points' own values."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    across = _Axis(xs, (MARGIN, WIDTH - MARGIN), log_x)
    up = _Axis(ys, (HEIGHT - MARGIN, MARGIN), log_y).widened()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, more='font-size="15"'),
        _text(WIDTH / 2, HEIGHT - 16, x_label),
        _text(16, HEIGHT / 2, y_label, more=f'transform="rotate(-90 16 {HEIGHT / 2})"'),
    ]
    for value in up.ticks():
        y = up(value)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(_text(MARGIN - 6, y + 4, f"{value:g}", "end"))
    parts += [_text(across(x), HEIGHT - MARGIN + 18, f"{x:g}") for x in (xs if log_x else across.ticks())]
    for number, ((name, points), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if dots:
            parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        column = MARGIN + number * (WIDTH - 2 * MARGIN) / len(curves)
        parts.append(f'<path d="M{column:.1f} 42h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(column + 20, 46, name, "start", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def log_log(title: str, x_label: str, y_label: str, curves: Mapping[str, Points]) -> str:
    """`plot` with both axes logarithmic."""
    return plot(title, x_label, y_label, curves, log_x=True, log_y=True)


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
