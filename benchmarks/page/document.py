"""A page in blocks, as Markdown or as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePosixPath

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 3rem } svg { max-width: 100%; height: auto }
div.table { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap }
"""


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Words, of which those in backticks are code."""

    text: str


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Points:
    """A list."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A picture; `name` is its file's, `alt` says in words what it shows."""

    name: str
    alt: str
    svg: str


Block = Heading | Paragraph | Table | Points | Figure


def as_markdown(blocks: Sequence[Block], folder: str) -> str:
    """Pictures are files in `folder`; those that follow each other share a line where there is room.

    Whatever else than code in backticks would be markup is escaped: words of a results file are words.
    """
    parts: list[str] = []
    after_figure = False
    for block in blocks:
        match block:
            case Heading(level, text):
                part = f"{'#' * level} {_escaped(text)}"
            case Paragraph(text):
                part = _line(text)
            case Table(head, rows):
                lines = [[_escaped(cell) for cell in line] for line in (head, *rows)]
                lines.insert(1, ["---"] * len(head))
                part = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            case Points(texts):
                part = "\n".join(f"- {_line(line)}" for line in texts)
            case Figure(name, alt, _):
                part = f"![{_escaped(alt)}]({_address(folder, name)})"
        separator = "\n" if after_figure and isinstance(block, Figure) else "\n\n"
        parts.append(f"{separator}{part}")
        after_figure = isinstance(block, Figure)
    return "".join(parts).lstrip() + "\n"


def as_html(blocks: Sequence[Block]) -> str:
    """One file, with its pictures inside."""
    parts = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"<h{level}>{_inline(text)}</h{level}>")
            case Paragraph(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Table(head, rows):
                cells = ["".join(f"<th>{_inline(cell)}</th>" for cell in head)]
                cells += ["".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in rows]
                body = "\n".join(f"<tr>{line}</tr>" for line in cells)
                parts.append(f'<div class="table"><table>{body}</table></div>')
            case Points(texts):
                parts.append("<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in texts) + "</ul>")
            case Figure(_, _, svg):
                parts.append(svg)
    body = "\n".join(parts)
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{body}
</body></html>
"""


CODE = re.compile(r"(?<!`)`([^`|]+)`(?!`)")
# Signs of Markdown that a backslash makes words of, of which _ is none inside a word. Then those of HTML and of tables,
# those of extensions that know no backslash, and those that would spoil a backslash or code beside them.
MARKUP = re.compile(r"([*{}\[\]#!]|(?<![^\W_])_|_(?![^\W_]))|[<>&|~^$\\`]")
LIST = re.compile(r"[-+]|\d+(?=[.)](\s|$))")


def _inline(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", escape(text))


def _address(folder: str, name: str) -> str:
    """Of a picture in a folder beside the page, with what an address may not hold written by numbers."""
    return PurePosixPath("/", folder, f"{name}.svg").as_uri().removeprefix("file:///")


def _escaped(text: str) -> str:
    words = CODE.split(" ".join(text.split()))
    words[::2] = [MARKUP.sub(lambda sign: f"\\{sign[0]}" if sign[1] else _entity(sign[0]), each) for each in words[::2]]
    words[1::2] = [f"`{each}`" for each in words[1::2]]
    return "".join(words)


def _line(text: str) -> str:
    """`text` on a line of its own, where its first letter could open a list."""
    escaped = _escaped(text)
    return _entity(escaped[0]) + escaped[1:] if LIST.match(escaped) else escaped


def _entity(letter: str) -> str:
    return f"&#{ord(letter)};"
