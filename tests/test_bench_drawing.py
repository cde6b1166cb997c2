"""Curves as SVG: well formed, inside the picture, told apart."""

import re
from xml.etree import ElementTree

import pytest

from ejkernel import _drawing as drawing

CURVES = {"a < b": [(64, 0.5), (256, 2.0), (1024, 90.0)], "other": [(64, 3.0), (1024, 7.0)]}
SVG = "{http://www.w3.org/2000/svg}"


def picture(**options):
    return ElementTree.fromstring(drawing.plot("A & B", "tokens", "ms", CURVES, log_x=True, log_y=True, **options))


@pytest.mark.parametrize("size", [(336, 250), (640, 400)])
def test_curves_lie_inside(size):
    root = picture(size=size)
    lines = [each.get("points") for each in root.iter(f"{SVG}polyline")]
    points = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert [len(line) for line in points] == [3, 2]
    for x, y in (point for line in points for point in line):
        assert drawing.LEFT <= x <= size[0] - drawing.RIGHT and drawing.TITLE <= y <= size[1] - drawing.BOTTOM
    (x0, low), (x1, _), (x2, high) = points[0]
    assert high < low and x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # up is less; 64, 256, 1024 are equally far apart
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert {"A & B", "tokens", "ms", "64", "256", "1024", "0.1", "100", "a < b", "other"} <= set(words)


def test_broken_lines_share_colour_and_legend():
    root = picture(dashed={"other": [(64, 1.0), (256, 2.0)]}, colours={"other": 5})
    lines = {each.get("stroke-dasharray"): each.get("stroke") for each in list(root.iter(f"{SVG}polyline"))[1:]}
    assert lines == {None: drawing.COLOURS[5], "5 4": drawing.COLOURS[5]}
    assert [each.text for each in root.iter(f"{SVG}text")].count("other") == 1


def test_a_long_legend_makes_the_picture_higher_not_the_curves_lower():
    one, many = (
        drawing.plot(
            "t", "x", "y", {f"a rather long name {i}": [(1, 1.0), (2, 2.0)] for i in range(n)}, size=(336, 250)
        )
        for n in (1, 5)
    )
    heights = [int(re.search(r'height="(\d+)"', each)[1]) for each in (one, many)]
    assert heights == [250, 250 + 4 * drawing.LINE]
    spans = []
    for each in (one, many):
        ys = [float(y) for y in re.findall(r'class="grid" d="M\d+ ([\d.]+)H', each)]
        spans.append(max(ys) - min(ys))
    assert spans[0] == pytest.approx(spans[1], abs=0.2)


def test_marks_and_themes():
    assert "prefers-color-scheme" in drawing.plot("t", "x", "y", CURVES, themed=True)
    assert "prefers-color-scheme" not in drawing.plot("t", "x", "y", CURVES)
    marked = drawing.plot("t", "", "y", {"a": [(0, 1.0)]}, x_marks={0.0: "float32", 1.0: "bfloat16"}, log_y=True)
    assert ">float32<" in marked and ">bfloat16<" in marked
