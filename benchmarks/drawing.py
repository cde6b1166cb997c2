"""Curves on logarithmic axes as SVG, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 640, 400, 64
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")

Points = Sequence[tuple[float, float]]


def log_log(title: str, x_label: str, y_label: str, curves: Mapping[str, Points]) -> str:
    """An SVG picture of `curves`, both axes logarithmic, with a line at every power of ten on the y axis."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def across(x: float) -> float:
        share = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return MARGIN + share * (WIDTH - 2 * MARGIN)

    def up(y: float) -> float:
        share = (math.log10(y) - low) / (high - low)
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(WIDTH / 2, 24, title, more='font-size="15"'),
        text(WIDTH / 2, HEIGHT - 16, x_label),
        text(16, HEIGHT / 2, y_label, more=f'transform="rotate(-90 16 {HEIGHT / 2})"'),
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(text(MARGIN - 6, y + 4, f"{10.0**power:g}", "end"))
    parts += [text(across(x), HEIGHT - MARGIN + 18, f"{x:g}") for x in xs]
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        parts.append(text(across(x) - 8, up(y) - 8, name, "end", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"
