"""The page about a run: self-contained, with its plots inside."""

from collections.abc import Callable, Sequence
from html import escape

import jax

from examples.demo import drawing
from examples.demo.generation import Cost
from examples.demo.training import Score, Settings

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #6a6a6a; --line: #ddd; --box: #f6f6f6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d8dae0; --paper: #16181d; --faint: #989ca6; --line: #3a3f4b; --box: #1e2129 }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }
body { color: var(--ink); background: var(--paper) }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin-top: 2.2rem }
svg { display: block; width: 100%; height: auto; box-sizing: border-box; margin: 1rem 0 }
svg { border: 1px solid var(--line); border-radius: 4px }
table { border-collapse: collapse } td { padding: .25rem 1.5rem .25rem 0; vertical-align: top }
td + td { white-space: nowrap; padding-right: 0; text-align: right; font-variant-numeric: tabular-nums }
tr + tr { border-top: 1px solid var(--line) }
pre { background: var(--box); padding: 1rem; overflow: auto; max-height: 24rem; border-radius: 4px }
pre { font-size: 14px; line-height: 1.4 }
code { white-space: nowrap } .prompt { color: var(--faint) }
@media (max-width: 36rem) { h1 { font-size: 1.35rem } pre { font-size: 12px } }
"""
# what a reader would write; a test runs it
CODE = """\
import jax.numpy as jnp
from flax import nnx
from ejkernel.layers import GatedLinearAttention

layer = GatedLinearAttention({width}, heads={heads}, convolution=5, rngs=nnx.Rngs(0))

# training: documents of any length in one stream
stream = jnp.ones(({tokens}, {width}))
output, _ = layer(stream, cu_seqlens=jnp.array([0, 300, {tokens}]))

# generating: the prompt at once, then token by token
output, state = layer(jnp.ones((1, 50, {width})))
output, state = layer(jnp.ones((1, 1, {width})), state)
"""
POINTS = 120  # a loss curve has no use for more
SIZE = (420, 290)  # small enough that a phone need not shrink its words out of sight


def page(
    settings: Settings,
    history: Sequence[tuple[float, float]],
    score: Score,
    linear: Sequence[Cost],
    softmax: Sequence[Cost],
    prompt: bytes,
    sample: bytes,
) -> str:
    """The HTML page."""
    figures = {
        "loss on unseen text": f"{score.loss:.3f} bits/byte",
        "floor: the text's entropy": f"{score.floor:.3f} bits/byte",
        "from byte frequencies alone": f"{score.unigram:.3f} bits/byte",
        "answers all right": f"{score.recall:.1%}",
        "guessing among the places told": f"{score.chance:.1%}",
    }
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in figures.items())
    trained = f"{len(history)} steps of {settings.tokens} packed bytes"
    model = f"{settings.depth} layers, width {settings.width}, {settings.heads} heads"
    where = f"JAX {jax.__version__} on {jax.devices()[0].device_kind}"
    text = f"<span class='prompt'>{escape(_readable(prompt))}</span>{escape(_readable(sample))}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ejkernel demo</title><style>{STYLE}</style></head><body>
<h1>A byte-level language model with gated linear attention</h1>
<p>{escape(model)}; trained for {escape(trained)}; {escape(where)}.</p>
<table>{rows}</table>
<h2>The layer</h2>
<p>All that a model needs to know of it; inside it is one call of <code>ejkernel.recurrent_gla</code>.</p>
<pre>{escape(code(settings))}</pre>
<h2>Loss against the floor</h2>
<p>Documents say where people are and ask for it later. A program draws them at random, so their entropy is known:
no model can get below it.</p>
{_loss_plot(history, score)}
<h2>Recall by distance</h2>
<p>An answer counts if each of its bytes is the model's likeliest. Chance is a guess among the places told so far.</p>
{_recall_plot(score)}
<h2>The price of a byte</h2>
<p>Time and memory to generate one more byte, by the number of bytes before it. Linear attention carries a state of
fixed size. Softmax attention, in a model of the same size, reads a cache that grows with the context. It is written
by hand for one sequence on a CPU, as two products with keys and values <code>[H, L, D]</code>, the fastest way that we
know of.</p>
{cost_plot("Time for a byte", "milliseconds", linear, softmax, lambda cost: cost.milliseconds)}
{cost_plot("Memory carried", "megabytes", linear, softmax, lambda cost: cost.state_bytes / 1e6)}
<h2>A sample</h2>
<p>The grey part was given. A colon tells where somebody is, a question mark asks for it and is answered.</p>
<pre>{text}</pre>
</body></html>
"""


def code(settings: Settings) -> str:
    return CODE.format(width=settings.width, heads=settings.heads, tokens=settings.tokens)


def _loss_plot(history: Sequence[tuple[float, float]], score: Score) -> str:
    width = max(len(history) // POINTS, 1)
    groups = [history[start : start + width] for start in range(0, len(history), width)]
    losses = [(start * width + 1, sum(loss for loss, _ in each) / len(each)) for start, each in enumerate(groups)]
    ends = (1, max(len(history), 2))
    curves = {
        "loss": losses,
        "byte frequencies": [(x, score.unigram) for x in ends],
        "floor": [(x, score.floor) for x in ends],
    }
    return drawing.lines("Training loss", "step", "bits per byte", curves, log_y=True, dots=False, size=SIZE)


def _recall_plot(score: Score) -> str:
    curves = {
        "recall": [(round(distance), recall) for distance, recall, _ in score.by_distance],
        "chance": [(round(distance), chance) for distance, _, chance in score.by_distance],
    }
    across, up = "bytes since the place was last named", "share of answers"
    return drawing.lines("Recall", across, up, curves, log_x=True, size=SIZE)


def cost_plot(
    title: str, unit: str, linear: Sequence[Cost], softmax: Sequence[Cost], cost: Callable[[Cost], float]
) -> str:
    """Costs by context, of the two kinds of attention."""
    curves = {
        "gated linear attention": [(each.context, cost(each)) for each in linear],
        "softmax attention": [(each.context, cost(each)) for each in softmax],
    }
    return drawing.lines(title, "bytes of context", unit, curves, log_x=True, log_y=True, size=SIZE)


def _readable(text: bytes) -> str:
    """Whole sentences, less the line that opens a document."""
    return text[: text.rfind(b"\n") + 1].decode("ascii", "replace").lstrip()
