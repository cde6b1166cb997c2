"""Trains the model on packed documents, and scores it on ones it has not seen."""

import itertools
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ejkernel.layers import GatedLinearAttention
from examples.demo import checkpoint, text
from examples.demo.model import ByteModel, Mixer
from examples.demo.progress import Progress

HELD_OUT = 1 << 30  # steps from here on are for scoring
STEPS_BETWEEN_CHECKPOINTS = 100


@dataclass(frozen=True)
class Settings:
    """Everything the trained parameters depend on."""

    seed: int = 0
    steps: int = 800
    tokens: int = 1024
    width: int = 128
    heads: int = 4
    depth: int = 2
    learning_rate: float = 6e-3


class Trained(NamedTuple):
    """A model's parameters and what its training saw: of each step the loss and the floor, in bits per byte."""

    parameters: Any
    optimizer: Any
    history: list[tuple[float, float]]


def gated_linear_attention(width: int, heads: int, rngs: nnx.Rngs) -> GatedLinearAttention:
    return GatedLinearAttention(width, heads, key_width=width, convolution=5, rngs=rngs)


def build(settings: Settings, mixer: Mixer = gated_linear_attention) -> tuple[Any, Any]:
    """The model's structure and its first parameters."""
    shape = {"width": settings.width, "heads": settings.heads, "depth": settings.depth}
    return nnx.split(ByteModel(mixer, **shape, rngs=nnx.Rngs(settings.seed)))


def bits_per_byte(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over the tokens that have a target."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    counted = targets >= 0
    return jnp.where(counted, nats, 0).sum() / counted.sum() / math.log(2)


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    peak, warm_up = settings.learning_rate, max(settings.steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warm_up, max(settings.steps, warm_up + 1), 0.05 * peak)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01))


def _history(path: Path, stored: Any) -> list[tuple[float, float]]:
    """Loss and floor of each step so far, as a checkpoint holds them."""
    pairs: list[Any] = stored if isinstance(stored, list) else [None]
    if not all(isinstance(pair, list) and [type(each) for each in pair] == [float, float] for pair in pairs):
        raise checkpoint.CheckpointError(f"{path}: its history is not a list of losses and floors")
    return [(loss, floor) for loss, floor in pairs]


def train(settings: Settings, path: Path, *, resume: bool = False) -> Trained | None:
    """Trains to the end and returns the model, or `None` after Ctrl-C; `path` holds the checkpoint in both cases."""
    graph, parameters = build(settings)
    optimizer = _optimizer(settings)
    trained = Trained(parameters, optimizer.init(parameters), [])
    if resume:
        header, arrays = checkpoint.load(path, asdict(settings), (trained.parameters, trained.optimizer))
        trained = Trained(*arrays, _history(path, header.get("history")))

    @jax.jit
    def step(parameters: Any, state: Any, tokens: Any, targets: Any, cu_seqlens: Any) -> tuple[Any, Any, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            logits, _ = nnx.merge(graph, parameters)(tokens, None, cu_seqlens)
            return bits_per_byte(logits, targets)

        loss, gradient = jax.value_and_grad(loss_of)(parameters)
        change, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, change), state, loss

    def save() -> None:
        header = {"settings": asdict(settings), "history": trained.history}
        checkpoint.save(path, header, (trained.parameters, trained.optimizer))

    first = len(trained.history)
    with Progress(settings.steps, first) as progress, _interrupts() as interrupted:
        for number in range(first, settings.steps):
            data = text.batch(settings.seed, number, settings.tokens)
            parameters, state, loss = step(
                trained.parameters, trained.optimizer, data.tokens, data.targets, data.cu_seqlens
            )
            history = [*trained.history, (float(loss), data.bits / data.predicted)]
            trained = Trained(parameters, state, history)
            progress.update(number + 1, float(loss), data.predicted)
            if interrupted():
                save()
                return None
            if (number + 1) % STEPS_BETWEEN_CHECKPOINTS == 0 or number + 1 == settings.steps:
                save()
    return trained


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C is only noted, so that the step under way ends; a second one insists."""
    noted = threading.Event()

    def note(number: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Score:
    """How a model does on unseen documents: losses in bits per byte, recall as the share of answers all right.

    Attributes:
        loss: The model's.
        floor: The text's entropy, which no model can beat.
        unigram: Of a model that knows how frequent each byte is, and no more.
        recall: Answers of which the likeliest bytes are all right.
        chance: Recall of guessing among the places told so far.
        by_distance: `(distance, recall, chance)` by how many bytes back the place was last named.
    """

    loss: float
    floor: float
    unigram: float
    recall: float
    chance: float
    by_distance: list[tuple[float, float, float]]


BUCKETS = (0, 16, 32, 64, 128, 256, 1 << 30)
FEWEST = 10  # answers that a distance needs to be shown


def evaluate(settings: Settings, parameters: Any, batches: int = 16) -> Score:
    """Scores `parameters` on `batches` held-out batches."""
    graph, _ = build(settings)

    @jax.jit
    def look(parameters: Any, tokens: Any, targets: Any, cu_seqlens: Any) -> tuple[jax.Array, jax.Array]:
        logits, _ = nnx.merge(graph, parameters)(tokens, None, cu_seqlens)
        return bits_per_byte(logits, targets), logits.argmax(-1)

    lost, bits, predicted, seen, answers = 0.0, 0.0, 0, Counter[int](), list[tuple[int, bool, float]]()
    for number in range(batches):
        data = text.batch(settings.seed, HELD_OUT + number, settings.tokens)
        loss, guess = look(parameters, data.tokens, data.targets, data.cu_seqlens)
        right = np.asarray(guess) == data.targets
        lost, bits, predicted = lost + float(loss) * data.predicted, bits + data.bits, predicted + data.predicted
        seen.update(data.targets[data.targets >= 0].tolist())
        for each in data.questions:
            # a byte is predicted at the one before it
            whole = bool(right[each.answer - 1 : each.answer - 1 + each.length].all())
            answers.append((each.distance, whole, 1 / each.known))
    unigram = -sum(count / predicted * math.log2(count / predicted) for count in seen.values())
    by_distance = []
    for low, high in itertools.pairwise(BUCKETS):
        some = [each for each in answers if low <= each[0] < high]
        if len(some) >= FEWEST:
            by_distance.append(_means(some))
    _, recall, chance = _means(answers)
    return Score(lost / predicted, bits / predicted, unigram, recall, chance, by_distance)


def _means(answers: list[tuple[int, bool, float]]) -> tuple[float, float, float]:
    distance, recall, chance = np.mean(np.array(answers, float).reshape(-1, 3), 0)
    return float(distance), float(recall), float(chance)
