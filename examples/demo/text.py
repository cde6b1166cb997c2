"""Text with a known entropy: documents that say where people are and ask for it later."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jun", "Kim", "Lou", "Mia", "Ned", "Olga")
PLACES = ("Accra", "Bonn", "Cairo", "Delhi", "Essen", "Fes", "Genoa", "Hanoi", "Izmir", "Jaipur", "Kyoto", "Lima")
ASIDES = ("rain fell", "snow fell", "a dog barked", "the bell rang", "it got late", "tea was made")

START = "\n"  # opens every document, so that its first letter is predicted from something
PEOPLE = 8  # at most so many in a document
SENTENCES = (24, 64)  # a document's length is drawn between these
TELL, ASK, ASIDE = 0.5, 0.35, 0.15  # without those that are not possible, in proportion


@dataclass(frozen=True)
class Question:
    """Where in a text an answer stands, and how far back what it asks for was said.

    Attributes:
        answer: Offset of the answer's first byte.
        length: Bytes in the answer.
        distance: Bytes since the place was last named for this person.
        known: People told of so far, the number to guess among.
    """

    answer: int
    length: int
    distance: int
    known: int


@dataclass(frozen=True)
class Document:
    """A text, the bits of chance that went into it, and the questions in it."""

    text: str
    bits: float
    questions: tuple[Question, ...]


def document(draw: np.random.Generator, limit: int) -> Document:
    """A document of at most `limit` bytes.

    Each choice can be read back from the text, so the bits of all choices are exactly the text's information: no model
    can predict it with fewer on average.

    >>> print(document(np.random.default_rng(1), 60).text.strip())
    the bell rang.
    Mia: Lima.
    Ned: Fes.
    Mia? Lima.
    Mia? Lima.
    """
    # told: of each person the place, and where it was last named
    text, bits, questions, told = START, 0.0, list[Question](), dict[str, tuple[str, int]]()
    for _ in range(draw.integers(*SENTENCES)):
        sentence, chance, name, place = _sentence(draw, told)
        if len(text) + len(sentence) > limit:
            break
        at = len(text) + sentence.find(place) if place else 0
        if name in told:
            questions.append(Question(at, len(place), at - told[name][1], len(told)))
        if name:
            told[name] = place, at
        text += sentence
        bits -= math.log2(chance)
    return Document(text, bits, tuple(questions))


def _sentence(draw: np.random.Generator, told: dict[str, tuple[str, int]]) -> tuple[str, float, str, str]:
    """The next sentence, its probability given all before it, and the name and place in it."""
    new = [name for name in NAMES if name not in told]
    weights = np.array([TELL if len(told) < PEOPLE else 0, ASK if told else 0, ASIDE])
    weights /= weights.sum()
    kind = draw.choice(3, p=weights)
    if kind == 0:
        name, place = new[draw.integers(len(new))], PLACES[draw.integers(len(PLACES))]
        return statement(name, place), weights[0] / len(new) / len(PLACES), name, place
    if kind == 1:
        name = list(told)[draw.integers(len(told))]
        return f"{name}? {told[name][0]}.\n", weights[1] / len(told), name, told[name][0]
    return f"{ASIDES[draw.integers(len(ASIDES))]}.\n", weights[2] / len(ASIDES), "", ""


def statement(name: str, place: str) -> str:
    return f"{name}: {place}.\n"


@dataclass(frozen=True)
class Batch:
    """Documents packed into one stream of fixed length.

    Attributes:
        tokens: `[T]` int32 bytes; what follows the last border is padding.
        targets: `[T]` int32, the next byte of the same document, -1 where there is none.
        cu_seqlens: `[N + 1]` int32 borders; sequences left over are empty.
        bits: The information in the bytes to predict.
        questions: With offsets into the stream.
    """

    tokens: np.ndarray
    targets: np.ndarray
    cu_seqlens: np.ndarray
    bits: float
    questions: tuple[Question, ...]

    @property
    def predicted(self) -> int:
        return int((self.targets >= 0).sum())


def batch(seed: int, step: int, tokens: int) -> Batch:
    """The batch of a step, which depends on nothing but these arguments."""
    # where there is room for few tokens, documents may be cut shorter than the shortest kind, and be more
    documents = list(itertools.islice(_documents(np.random.default_rng((seed, step)), tokens), sequences(tokens)))
    stream = "".join(each.text for each in documents).encode()
    borders = np.cumsum([0, *(len(each.text) for each in documents)])
    padded = np.zeros(tokens, np.int32)
    padded[: len(stream)] = np.frombuffer(stream, np.uint8)
    targets = np.append(padded[1:], 0)
    targets[len(stream) :] = -1
    targets[borders[1:] - 1] = -1
    cu_seqlens = np.full(sequences(tokens) + 1, borders[-1], np.int32)
    cu_seqlens[: len(borders)] = borders
    questions = tuple(
        Question(start + each.answer, each.length, each.distance, each.known)
        for start, document in zip(borders, documents, strict=False)
        for each in document.questions
    )
    return Batch(padded, targets, cu_seqlens, sum(each.bits for each in documents), questions)


def sequences(tokens: int) -> int:
    """Borders are as many in every batch, so that none compiles anew: room for documents of the shortest kind."""
    sentence = min(len(min(NAMES, key=len) + "? " + min(PLACES, key=len)), len(min(ASIDES, key=len))) + len(".\n")
    return tokens // (len(START) + SENTENCES[0] * sentence) + 1


def _documents(draw: np.random.Generator, room: int) -> Iterator[Document]:
    while room > len(START):
        each = document(draw, room)
        if len(each.text) == len(START):
            return
        yield each
        room -= len(each.text)
