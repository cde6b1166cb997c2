"""What an error says: the argument, what it got, what would fit."""

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import jax


def fail(argument: str, got: object, expected: str) -> NoReturn:
    """Raises the `ValueError` that every check of a value ends in."""
    raise ValueError(f"{argument}: got {got}; expected {expected}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns the caller of the library, however many of its own functions lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ejkernel":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def is_concrete(x: Any) -> bool:
    """Whether `x`'s values can be read now, rather than only when a compiled function runs."""
    return not isinstance(x, jax.core.Tracer)


class Dims:
    """Letters bound to sizes as arrays are matched against shape patterns, so that one mistake is told once.

    A pattern names one dimension a word: a letter bound by an earlier array must agree with it, a number must be
    that number, and `1|H|Hkv` allows any of its parts (and binds none).

    >>> import numpy as np
    >>> dims = Dims()
    >>> dims.match("query", np.zeros((2, 5, 4, 16)), "B T H K")
    >>> dims.match("key", np.zeros((2, 6, 4, 16)), "B T Hkv K")
    Traceback (most recent call last):
    ValueError: key: got shape (2, 6, 4, 16); expected [B, T, Hkv, K] with B=2, T=5, K=16 (B, T, K as in query)
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = dict(sizes)
        self._source: dict[str, str] = {}

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def match(self, argument: str, x: Any, *patterns: str, hint: str = "") -> None:
        """Checks `x` against the first pattern of its rank, binding letters not seen before; errors end in `hint`."""
        shape = tuple(x.shape)
        of_rank = [words for words in map(_words, patterns) if len(words) == len(shape)]
        for words in of_rank:
            others = [(word, size) for word, size in zip(words, shape, strict=True) if self.sizes.get(word) != size]
            if all(self._fits(word, size) for word, size in others):
                for word, size in others:
                    if word not in self.sizes and word.isalpha():
                        self.bind(word, size, argument)
                return
        fail(argument, f"shape {shape}", self._expected(of_rank or [*map(_words, patterns)]) + hint)

    def bind(self, letter: str, size: int, argument: str) -> None:
        """Says what a letter stands for from here on, and whose size that is."""
        self.sizes[letter], self._source[letter] = size, argument

    def _fits(self, word: str, size: int) -> bool:
        if "|" in word:
            return any(self._fits(part, size) for part in word.split("|"))
        return self.sizes.get(word, size) == size if word.isalpha() else size == int(word)

    def _expected(self, patterns: Sequence[Sequence[str]]) -> str:
        letters = list(dict.fromkeys(part for words in patterns for word in words for part in word.split("|")))
        known = [letter for letter in letters if letter in self.sizes]
        text = " or ".join(f"[{', '.join(words)}]" for words in patterns)
        if known:
            text += " with " + ", ".join(f"{letter}={self.sizes[letter]}" for letter in known)
        sources: dict[str, list[str]] = {}
        for letter in known:
            if letter in self._source:
                sources.setdefault(self._source[letter], []).append(letter)
        if sources:
            text += " (" + "; ".join(f"{', '.join(each)} as in {name}" for name, each in sources.items()) + ")"
        return text


@functools.cache
def _words(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.split())
