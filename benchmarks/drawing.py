"""Bars as SVG, beside the demo's lines: what the pages' pictures are drawn with."""

from collections.abc import Mapping, Sequence

from examples.demo.drawing import Picture, lines, logarithmic, looks

__all__ = ["bars", "lines"]


def bars(
    title: str,
    unit: str,
    rows: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    flat: bool = False,
    log: bool = True,
    size: tuple[int, int] = (640, 400),
    colours: Mapping[str, int] | None = None,
) -> str:
    """A bar for each of `series` in each of `rows`; `flat` ones have their names at left.

    The axis is logarithmic. Without `log` it begins at zero, and flat bars have their numbers at their ends.
    """
    look = looks(list(series), colours)
    values = [value for each in series.values() for value in each if value]
    values.append(0.97 * min(values))  # a bar of no length would be none
    with Picture(title, size) as picture:
        axes = picture.axes
        if not flat:
            low, _ = picture.up_axis(values, log=log)
        elif log:
            axes.grid(axis="x")
            low, _ = logarithmic(axes.set_xscale, axes.xaxis, axes.set_xlim, values)
        else:
            axes.grid(axis="x")
            low = 0.0
        # as thick as where a row has the most bars; those of a row side by side, around its name
        counts = [sum(bool(each[row]) for each in series.values()) for row in range(len(rows))]
        thick = 0.84 / max(counts)
        nexts = [row - thick * (count - 1) / 2 for row, count in enumerate(counts)]
        handles = []
        for name, each in series.items():
            known = [(row, value) for row, value in enumerate(each) if value]
            at = [nexts[row] for row, _ in known]
            for row, _ in known:
                nexts[row] += thick
            # from where the axis begins: a logarithmic one has no zero
            lengths = [value - low for _, value in known]
            draw = axes.barh if flat else axes.bar
            start = {"left": low} if flat else {"bottom": low}
            drawn = draw(at, lengths, thick * 0.9, color=look[name][0], **start)
            if flat and not log:
                axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9)
            handles.append(picture.patch(color=look[name][0]))
        if flat:
            axes.set_yticks(range(len(rows)), rows)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xlabel(unit)
        else:
            axes.set_xticks(range(len(rows)), rows)
            axes.set_ylabel(unit)
        return picture.svg(handles, list(series))
