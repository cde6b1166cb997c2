"""Line plots as SVG, by matplotlib: the same file for the same numbers, legible on white and on black."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import quoteattr

LINE = 18  # pixels that a line of the legend takes
# told apart, with the marks, by those who see fewer colours, and readable on white and on black
COLOURS = ("#2f7ed8", "#e4572e", "#2a9d5c", "#9b5de5", "#b07d00", "#0097a7", "#d6469b", "#7f8c8d", "#a0703c", "#6b7be0")
MARKS = "sD^o"
# what a picture is drawn in, and what takes its place where the reader's screen is dark
INK, GRID, PAPER = "#2f333b", "#dcdee3", "#ffffff"
DARK = {INK: "#d8dae0", GRID: "#3a3f4b", PAPER: "#1e2129"}
STYLE = "".join(
    f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
    for light, dark in DARK.items()
    for what in ("fill", "stroke")
)
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "ejkernel",  # names inside the file that do not change from run to run
    "text.parse_math": False,  # a $ is a $
    "font.size": 12,
    "legend.title_fontsize": 14,
    # the first comes with matplotlib, which sets with it; the others are what a reader without it may have
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Segoe UI", "Helvetica", "Arial"],
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "grid.color": GRID,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.borderaxespad": 0.2,
}

Points = Sequence[tuple[float, float]]


def missing() -> str | None:
    """Why nothing can be drawn, or `None`."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"drawing needs matplotlib, the extra cli: pip install '.[cli]' in a checkout ({error})"
    return None


def lines(
    title: str,
    x_label: str,
    y_label: str,
    curves: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    dots: bool = True,
    size: tuple[int, int] = (640, 400),
    colours: Mapping[str, int] | None = None,
) -> str:
    """The `curves` as SVG; a logarithmic x axis is marked at the values of the points.

    `size` is in pixels, with a legend of one line. `colours` are indices of `COLOURS` by curve, so that a curve looks
    the same in several pictures.
    """
    look = looks(list(curves), colours)
    with Picture(title, size) as picture:
        axes = picture.axes
        for name, points in curves.items():
            colour, mark = look[name]
            xs, ys = zip(*points, strict=True) if points else ((), ())
            # also over the edge: a mark at zero would be cut in two
            axes.plot(xs, ys, color=colour, marker=mark if dots else "", linewidth=2, clip_on=False)
        all_x = sorted({x for points in curves.values() for x, _ in points})
        if log_x:
            axes.set_xscale("log")
            axes.set_xticks(_apart(all_x), [_number(x) for x in _apart(all_x)])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_formatter(lambda x, _: _number(x))
        picture.up_axis([y for points in curves.values() for _, y in points], log_y)
        axes.set(xlabel=x_label, ylabel=y_label)
        handles = [
            picture.line([], [], color=look[name][0], marker=look[name][1] if dots else "", linewidth=2)
            for name in curves
        ]
        return picture.svg(handles, list(curves))


class Picture:
    """A figure of matplotlib, inside whose context matplotlib has our settings."""

    def __init__(self, title: str, size: tuple[int, int]) -> None:
        import matplotlib
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        self.title, self.size, self.line, self.patch = title, size, Line2D, Patch
        self.settings = matplotlib.rc_context()

    def __enter__(self) -> "Picture":
        import matplotlib
        from matplotlib.figure import Figure

        self.settings.__enter__()
        matplotlib.rcdefaults()  # not what the reader likes for pictures of their own
        matplotlib.rcParams.update(SETTINGS)
        width, height = self.size
        # at 72 dots an inch a point is a pixel
        self.figure = Figure((width / 72, height / 72), dpi=72, layout="constrained")
        self.axes: Any = self.figure.add_subplot()
        self.axes.tick_params(length=0)
        return self

    def __exit__(self, *error: Any) -> None:
        self.settings.__exit__(*error)

    def up_axis(self, values: Sequence[float], log: bool) -> tuple[float, float]:
        """Makes the y axis hold `values`, and returns its limits."""
        self.axes.grid(axis="y")
        if log:
            return logarithmic(self.axes.set_yscale, self.axes.yaxis, self.axes.set_ylim, values)
        self.axes.set_ylim(bottom=min(0.0, *values))
        self.axes.yaxis.set_major_formatter(lambda y, _: _number(y))
        return self.axes.get_ylim()

    def svg(self, handles: Sequence[Any], names: Sequence[str]) -> str:
        """The picture as SVG, with a legend in as many columns as fit, and higher by as much as the legend needs."""
        width, height = self.size
        for columns in range(min(len(names), width // 80), 0, -1):  # hardly a name takes less
            look = {"title": self.title, "alignment": "left", "columnspacing": 1.2, "handlelength": 1.6}
            legend = self.figure.legend(handles, names, loc="outside upper left", ncols=columns, **look)
            if columns == 1 or legend.get_window_extent().width <= width - 8:
                break
            legend.remove()
        rows = math.ceil(len(names) / columns)
        height += LINE * (rows - 1)
        self.figure.set_size_inches(width / 72, height / 72)
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return _tidied(file.getvalue(), self.title, width, height)


def logarithmic(set_scale: Any, axis: Any, set_limits: Any, values: Sequence[float]) -> tuple[float, float]:
    """Makes an axis logarithmic, from one power of ten to another, and returns these."""
    from matplotlib.ticker import LogLocator

    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    set_scale("log")
    axis.set_major_locator(LogLocator(numticks=9))
    axis.set_major_formatter(lambda value, _: _number(value))
    axis.set_minor_locator(LogLocator(numticks=1))
    set_limits(10.0**low, 10.0**high)
    return 10.0**low, 10.0**high


def looks(names: Sequence[str], colours: Mapping[str, int] | None) -> dict[str, tuple[str, str]]:
    """The colour and the mark of each name."""
    numbers = {name: (colours or {}).get(name, number) for number, name in enumerate(names)}
    return {name: (COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]) for name, number in numbers.items()}


def _apart(xs: Sequence[float]) -> list[float]:
    """The sorted `xs` without those whose labels would overlap on a logarithmic axis."""
    apart: list[float] = []
    for x in xs:
        if not apart or math.log(x / apart[-1]) >= math.log(xs[-1] / xs[0]) / 9:
            apart.append(x)
    return apart


def _number(value: float) -> str:
    """`value` in few letters, as there is little room beside an axis."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:g}"


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def _tidied(svg: str, title: str, width: int, height: int) -> str:
    """The SVG made fit for a page with several: in pixels, with a title, and with dark colours for dark screens."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # names that nothing refers to would stand more than once in a page
    svg = re.sub(r' id="(?![mpC][0-9a-f]{6})[^"]*"', "", svg)
    # to what can be seen: further digits may differ between machines
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d+", _rounded, " ".join(tag[0].split())), svg)
    body = svg[svg.index(">") + 1 :]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)}>\n'
        f"<style>@media (prefers-color-scheme: dark) {{{STYLE}}}</style>{body.rstrip()}\n"
    )
