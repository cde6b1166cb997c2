"""Pictures: well formed, numbers where they belong, told apart, legible on white and on black, and always the same."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import pictures
from benchmarks.drawing import bars
from examples.demo import drawing

ROOT = Path(__file__).parent.parent
CURVES = {"a < b": [(64, 0.5), (256, 2.0), (1024, 90.0)], "other": [(64, 3.0), (1024, 7.0)]}
SVG = "{http://www.w3.org/2000/svg}"


def picture(**options):
    return drawing.lines("A & $B", "tokens", "ms", CURVES, log_x=True, log_y=True, **options)


def words(svg):
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def curves(svg):
    """The points of the coloured lines, without those of the legend, by colour and kind of line."""
    found = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        style = path.get("style") or ""
        colour = re.search(r"stroke: (#\w+)", style)
        if "fill: none" in style and colour and colour[1] in drawing.COLOURS:
            points = re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path.get("d"))
            found.setdefault((colour[1], "dasharray" in style), [(float(x), float(y)) for x, y in points])
    return found


@pytest.mark.parametrize("size", [(336, 280), (640, 400)])
def test_points_lie_where_their_numbers_are(size):
    first, other = curves(picture(size=size)).values()
    assert [len(first), len(other)] == [3, 2]
    assert all(0 < x < size[0] and 0 < y < size[1] for x, y in first + other)
    (x0, y0), (x1, y1), (x2, y2) = first
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.05)  # 64, 256, 1024 are equally far apart
    assert (y0 - y1) / (y1 - y2) == pytest.approx(np.log(2.0 / 0.5) / np.log(90 / 2.0), abs=0.01)
    assert (other[0][0], other[1][0]) == (x0, x2)
    assert {"A & $B", "tokens", "ms", "64", "256", "1024", "0.1", "100", "a < b", "other"} <= set(words(picture()))


def test_colours_are_those_asked_for():
    assert (drawing.COLOURS[5], False) in curves(picture(colours={"other": 5}))


def test_a_long_legend_makes_the_picture_higher_not_the_curves_lower():
    spans, heights = [], []
    for count in (1, 5):
        many = {f"a rather long name {number}": [(1, 1.0), (2, 2.0)] for number in range(count)}
        svg = drawing.lines("t", "x", "y", many, size=(336, 250))
        heights.append(int(re.search(r'height="(\d+)"', svg)[1]))
        (_, y0), (_, y1) = next(iter(curves(svg).values()))
        spans.append(y0 - y1)
    assert heights == [250, 250 + 4 * drawing.LINE]
    assert spans[0] == pytest.approx(spans[1], abs=3)


def corners(svg):
    """Those of the first series' bars; the last is the legend's."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    bars = [each for each in paths if f"fill: {drawing.COLOURS[0]}" in (each.get("style") or "")]
    return [np.array(re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", each.get("d")), float) for each in bars]


@pytest.mark.parametrize("flat", [False, True])
def test_bars_are_as_long_as_the_logarithms(flat):
    values = [1e-3, 1e-1, None]
    svg = bars("t", "ms", ["x", "y", "z"], {"a": values, "b": [1e-2, None, 1.0]}, flat=flat)
    *drawn, _ = (np.ptp(each[:, 0 if flat else 1]) for each in corners(svg))
    # the axis begins at 1e-4, a decade below the least
    assert len(drawn) == 2 and drawn[1] == pytest.approx(3 * drawn[0], abs=0.1)
    assert {"x", "y", "z", "a", "b", "ms"} <= set(words(svg))


def test_bars_are_as_long_as_the_numbers():
    svg = bars("t", "ms", ["x", "y"], {"a": [1.25, 5.0], "b": [2.0, None]}, flat=True, log=False)
    first, second, _ = (np.ptp(each[:, 0]) for each in corners(svg))
    assert second == pytest.approx(4 * first, abs=0.1)
    assert {"1.25", "5.00", "2.00"} <= set(words(svg))


def test_any_numbers_can_be_drawn():
    extreme = [(1, 1e-9), (2**53, 1e30)]
    for log in (False, True):
        ElementTree.fromstring(drawing.lines("t", "x", "y", {"a": extreme}, log_x=True, log_y=log))
    ElementTree.fromstring(drawing.lines("t", "x", "y", {"a": [(5, 3.0)]}, log_x=True, log_y=True))
    ElementTree.fromstring(bars("t", "y", ["x"], {"a": [1e-300], "b": [1e30]}))


def luminance(colour):
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_it_is_legible_on_white_and_on_black():
    """What WCAG 2 asks of words and of lines."""
    for ink, paper in ((drawing.INK, drawing.PAPER), (drawing.DARK[drawing.INK], drawing.DARK[drawing.PAPER])):
        assert contrast(ink, paper) >= 7
        assert min(contrast(colour, paper) for colour in drawing.COLOURS) >= 3
    svg = picture()
    assert "prefers-color-scheme: dark" in svg
    # whatever is drawn has one of the colours that are known to be legible, or changes with the screen
    drawn = set(re.findall(r'style="[^"]*(?:fill|stroke): (#\w+)', svg))
    assert drawn <= {*drawing.DARK, *drawing.COLOURS}


def test_the_same_numbers_give_the_same_letters(monkeypatch):
    first = picture()
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)  # as a reader's own settings may say
    assert picture() == first and matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("path", pictures.PICTURES)
def test_the_committed_pictures_are_what_the_committed_numbers_give(path):
    made = (ROOT / path).read_text(encoding="utf-8")
    assert made == pictures.drawn(path), f"{path} is not what its numbers give; python -m benchmarks.pictures draws it"
