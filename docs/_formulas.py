"""Typesets formulas as MathML, which browsers draw by themselves, without a network.

A page has one in LaTeX, between lines of `$$`; its own lines end in two backslashes and
are aligned at `&`.
"""

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"^<math[^>]*>|</math>$")


def formula(latex: str) -> str:
    """The lines of a formula as a table, on one line of HTML."""
    rows = (line.split("&") for line in re.split(r"\\\\\n", latex))
    cells = ("".join(f"<mtd>{_piece(cell)}</mtd>" for cell in row) for row in rows)
    table = "".join(f"<mtr>{row}</mtr>" for row in cells)
    math = f'<math display="block"><mtable>{table}</mtable></math>'
    return f'<div class="formula">{math}</div>'


def _piece(latex: str) -> str:
    # a relation at the start of a cell has a space before it, as in TeX
    return OUTSIDE.sub("", convert("{}" + " ".join(latex.split())))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs makes a page of, given the text that the page's file holds."""
    return FORMULA.sub(lambda found: formula(found[1]), markdown)
