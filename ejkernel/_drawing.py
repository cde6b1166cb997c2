"""Curves as SVG, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, BOTTOM, TITLE, LINE = 58, 20, 48, 28, 18  # pixels around the curves, and a line of the legend
INSET = 12  # keeps what stands under the first and the last point inside
LETTER, KEY = 6.6, 24  # about how wide a letter is, and what stands before a name in the legend
# told apart, with the marks, by those who see fewer colours, and readable on white and on black
COLOURS = ("#2f7ed8", "#e4572e", "#2a9d5c", "#9b5de5", "#c08a00", "#00a3b4", "#d6469b", "#7f8c8d", "#8d6e4a", "#5c6bc0")
MARKS = ("M-3-3h6v6h-6z", "M-4 0L0-4L4 0L0 4z", "M0-4L4 3H-4z", "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z")
DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    " .paper { fill: #1e2129 } text { fill: #d8dae0 } .grid { stroke: #3a3f4b } }</style>"
)

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
    size: tuple[int, int] = (WIDTH, HEIGHT),
    colours: Mapping[str, int] | None = None,
    dashed: Mapping[str, Points] | None = None,
    x_marks: Mapping[float, str] | None = None,
    themed: bool = False,
) -> str:
    """An SVG picture of `curves` with a legend; a logarithmic x axis is marked at the points' own values.

    `size` is that with a legend of one line. `colours` gives curves numbers of `COLOURS` so that a name looks the same
    in several pictures. `dashed` are more curves, each drawn like the one of its name but broken, and not in the legend
    again. `x_marks` are words to put at places of the x axis. A `themed` picture, for a file of its own, is dark where
    the reader's screen is.
    """
    width, height = size
    dashed = dashed or {}
    names = list(dict.fromkeys([*curves, *dashed]))
    numbers = {name: (colours or {}).get(name, number) for number, name in enumerate(names)}
    drawn = [(name, points, False) for name, points in curves.items() if points]
    drawn += [(name, points, True) for name, points in dashed.items() if points]
    legend, rows = _legend(names, numbers, width, dots)
    height += LINE * (rows - 1)  # a long legend takes nothing away from the curves
    xs = sorted({x for _, points, _ in drawn for x, _ in points})
    across = _Axis([*xs, *(x_marks or {})], (LEFT + INSET, width - RIGHT - INSET), log_x)
    up = _Axis([y for _, points, _ in drawn for _, y in points], (height - BOTTOM, TITLE + LINE * rows + 12), log_y)
    up.widened()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        f' role="img" aria-label={quoteattr(title)} font-family="system-ui, sans-serif" font-size="12">',
        DARK if themed else "",
        f'<rect class="paper" width="{width}" height="{height}" rx="4" fill="white"/>',
        _text(width / 2, 20, title, more='font-size="14"'),
        _text((LEFT + width - RIGHT) / 2, height - 12, x_label),
        _text(14, height / 2, y_label, more=f'transform="rotate(-90 14 {height / 2})"'),
        *legend,
    ]
    for value in up.ticks():
        y = up(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(value), "end"))
    marks = x_marks or {x: _number(x) for x in (xs if log_x else across.ticks())}
    parts += [_text(across(x), height - BOTTOM + 18, words) for x, words in marks.items()]
    for name, points, broken in drawn:
        places = [(across(x), up(y)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour, dash = COLOURS[numbers[name] % len(COLOURS)], ' stroke-dasharray="5 4"' if broken else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if dots:
            parts += [_mark(x, y, numbers[name]) for x, y in places]
    return "\n".join(part for part in [*parts, "</svg>"] if part) + "\n"


def log_log(title: str, x_label: str, y_label: str, curves: Mapping[str, Points]) -> str:
    """`plot` with both axes logarithmic."""
    return plot(title, x_label, y_label, curves, log_x=True, log_y=True)


def _legend(names: Sequence[str], numbers: Mapping[str, int], width: float, dots: bool) -> tuple[list[str], int]:
    """Names from left to right in as many columns as fit, and the number of lines that takes."""
    column = KEY + LETTER * max(map(len, names), default=0) + 8
    columns = max(1, min(len(names), int((width - 2 * RIGHT + 8) // column)))
    start = min(LEFT, width - RIGHT - columns * column)
    parts = []
    for place, name in enumerate(names):
        x, y = start + place % columns * column, TITLE + 10 + place // columns * LINE
        colour = COLOURS[numbers[name] % len(COLOURS)]
        parts.append(f'<path d="M{x:.1f} {y}h18" stroke="{colour}" stroke-width="2"/>')
        parts += [_mark(x + 9, y, numbers[name])] if dots else []
        parts.append(_text(x + KEY, y + 4, name, "start"))
    return parts, math.ceil(len(names) / columns)


def _number(value: float) -> str:
    """In few letters: there is little room beside an axis."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:g}"


def _mark(x: float, y: float, number: int) -> str:
    shape, colour = MARKS[number % len(MARKS)], COLOURS[number % len(COLOURS)]
    return f'<path d="{shape}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
