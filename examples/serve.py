"""Serves many requests at once with a hybrid model: continuous batching, and the answers that each would get alone.

Requests come and go. A step takes one token of each that is writing, the next piece of those whose prompt is not read
yet, and drafts: tokens that followed the last two earlier on, which one call verifies. A prompt that many begin with is
read once; its states and pages are shared. At the end every request is computed again, alone, token by token and its
prompt in one piece: the answers and all their logits must be the same to the bit. The model has learnt nothing, so what
it writes makes no sense; that it is the same does.

    python examples/serve.py
"""

import argparse
import time
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from flax import nnx

from ejkernel.layers import GatedDeltaNet, MultiHeadAttention, MultiHeadLatentAttention, ServingLimits, ragged_batch

SYMBOLS, WIDTH, WINDOW, DRAFTS = 64, 64, 40, 3
PIECE = 128  # tokens of a prompt that a step reads; cuts at multiples of 128 change no bit on any device
LIMITS = ServingLimits(
    tokens=320, sequences=6, slots=48, pages=120, page=16, longest=384, window_pages=80, checkpoints=1 + DRAFTS
)


class Model(nnx.Module):
    """A linear layer, softmax attention in a window and latent attention, without learnt weights."""

    def __init__(self, rngs):
        sizes = {"latent_dim": 32, "key_dim": 16, "rotary_dim": 16, "value_dim": 16}
        self.embed, self.head = nnx.Embed(SYMBOLS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)
        self.mixers = nnx.List(
            [
                GatedDeltaNet(WIDTH, key_heads=2, value_heads=4, key_dim=16, value_dim=16, rngs=rngs),
                MultiHeadAttention(WIDTH, heads=4, kv_heads=2, window=WINDOW, rngs=rngs),
                MultiHeadLatentAttention(WIDTH, heads=4, **sizes, rngs=rngs),
            ]
        )
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in self.mixers])

    def __call__(self, tokens, caches, batch):
        x, after = 16 * self.embed(tokens), []
        for norm, mixer, cache in zip(self.norms, self.mixers, caches, strict=True):
            mixed, cache = mixer(norm(x), cache, batch)
            x = x + mixed
            after.append(cache)
        return self.head(x), after


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(graph, parameters, caches, tokens, batch):
    return nnx.merge(graph, parameters)(tokens, caches, batch)


@dataclass
class Request:
    prompt: list
    wanted: int  # how many tokens it is to write
    logits: list = field(default_factory=list)  # that each written token was chosen by
    length: int = 0  # tokens that caches have
    slot: int = -1  # of its states
    pages: list = field(default_factory=list)
    window_pages: list = field(default_factory=list)  # -1 for those given back

    def __post_init__(self):
        self.tokens = list(self.prompt)  # and what was written

    def reads_prompt(self):
        return self.length < len(self.prompt)

    def next_tokens(self, piece, drafts):
        """What the next step reads: a piece of the prompt, or the last token and guesses of what follows it."""
        if self.reads_prompt():
            return self.prompt[self.length : self.length + piece - self.length % piece]
        *before, first, last = self.tokens
        room = min(drafts, self.wanted - len(self.logits) - 1)
        found = next((i for i in range(len(before) - 1, 0, -1) if before[i - 1 : i + 1] == [first, last]), len(before))
        return [last, *before[found + 1 : found + 1 + room]]


class Free:
    """Slots or pages that nobody has."""

    def __init__(self, count):
        self.numbers, self.shared, self.count, self.most = list(range(count)), (), count, 0

    def take(self):
        self.most = max(self.most, self.count - len(self.numbers) + 1)
        return self.numbers.pop()

    def give(self, numbers):
        self.numbers += [each for each in numbers if each >= 0 and each not in self.shared]


class Server:
    """A scheduler: who has which slots and pages, and what the next step reads."""

    def __init__(self, model, piece=PIECE, drafts=DRAFTS):
        self.graph, self.parameters = nnx.split(model)
        self.caches = [mixer.empty_cache(LIMITS) for mixer in model.mixers]
        self.slots, self.pages, self.window_pages = map(Free, (LIMITS.slots, LIMITS.pages, LIMITS.window_pages))
        self.piece, self.drafts, self.prefix = piece, drafts, Request([], 0)
        self.waiting, self.running, self.steps, self.right, self.guessed = [], [], 0, 0, 0

    def share(self, prompt):
        """Reads what many prompts begin with, and keeps its states and pages."""
        prefix = Request(prompt, 0)
        while prefix.reads_prompt():
            self.run([prefix])
        self.prefix, self.slots.shared = prefix, [prefix.slot]
        self.pages.shared, self.window_pages.shared = prefix.pages, prefix.window_pages

    def admit(self):
        """Lets requests in that there are pages for; those that begin with the prefix start behind it."""
        while self.waiting and len(self.running) < LIMITS.sequences:
            tokens = [len(each.prompt) + each.wanted for each in (self.waiting[0], *self.running)]
            if sum(-(-each // LIMITS.page) for each in tokens) > LIMITS.pages - len(self.prefix.pages):
                return
            request, prefix = self.waiting.pop(0), self.prefix
            if request.prompt[: prefix.length] == prefix.prompt:
                request.length, request.slot = prefix.length, prefix.slot
                request.pages, request.window_pages = list(prefix.pages), list(prefix.window_pages)
            self.running.append(request)

    def run(self, requests):
        """One call of the model, with tokens of these requests."""
        parts, room = [], LIMITS.tokens
        for request in requests:
            new = request.next_tokens(self.piece, self.drafts)
            if len(new) > room:
                continue
            room -= len(new)
            for pages, free in ((request.pages, self.pages), (request.window_pages, self.window_pages)):
                while len(pages) * LIMITS.page < request.length + len(new):
                    pages.append(free.take())
            # a state after each draft, as any may be the last right one; of a piece of a prompt, after all of it
            ends = [len(new)] if request.reads_prompt() else list(range(1, len(new) + 1))
            parts.append((request, new, [self.slots.take() for _ in ends], ends))
        chosen, new, slots, ends = zip(*parts, strict=True)
        batch = ragged_batch(
            LIMITS,
            tokens=[len(each) for each in new],
            lengths=[each.length for each in chosen],
            reads=[each.slot for each in chosen],
            writes=slots,
            at=ends,
            pages=[each.pages for each in chosen],
            window_pages=[each.window_pages for each in chosen],
        )
        tokens = np.zeros(LIMITS.tokens, np.int32)
        tokens[: batch.cu_seqlens[-1]] = np.concatenate(new)
        logits, self.caches = step(self.graph, self.parameters, self.caches, tokens, batch)
        logits, self.steps = np.asarray(logits), self.steps + 1
        for each, begin in zip(parts, batch.cu_seqlens, strict=False):
            self.advance(*each, logits[begin : begin + len(each[1])])

    def advance(self, request, new, slots, ends, logits):
        """Keeps what was right of the tokens read, and gives back the slots and pages that are not needed."""
        written, right = logits, len(new)
        if request.reads_prompt():
            written = logits[-1:] if request.length + right == len(request.prompt) else logits[:0]
        else:  # a draft is right if it is what is written there
            right = 1 + next((i for i, each in enumerate(new[1:]) if each != logits[i].argmax()), len(new) - 1)
            written = logits[:right]
            self.right, self.guessed = self.right + right - 1, self.guessed + len(new) - 1
        if request.wanted:
            request.logits += list(written)
            request.tokens += [int(each.argmax()) for each in written]
        kept = slots[ends.index(right)]
        self.slots.give([request.slot, *(each for each in slots if each != kept)])
        request.slot, request.length = kept, request.length + right
        for place in range((request.length - WINDOW + 1) // LIMITS.page):
            self.window_pages.give([request.window_pages[place]])
            request.window_pages[place] = -1
        if request in self.running and len(request.logits) == request.wanted:
            self.running.remove(request)
            self.slots.give([request.slot])
            self.pages.give(request.pages)
            self.window_pages.give(request.window_pages)

    def answer(self, requests):
        self.waiting += requests
        while self.waiting or self.running:
            self.admit()
            self.run(self.running)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40, help="the most that an answer has")
    arguments = parser.parse_args()
    model, random = Model(nnx.Rngs(0)), np.random.default_rng(0)
    prefix, requests = random.integers(SYMBOLS, size=PIECE).tolist(), []
    for number in range(arguments.requests):
        prompt = random.integers(SYMBOLS, size=random.integers(5, 150)).tolist()
        wanted = int(random.integers(1, arguments.tokens, endpoint=True))
        requests.append(Request(prefix + prompt if number % 3 else prompt, wanted))
    server = Server(model)
    server.share(prefix)
    begin = time.perf_counter()
    server.answer(requests)
    seconds, written = time.perf_counter() - begin, sum(each.wanted for each in requests)
    print(f"{written} tokens of {len(requests)} requests in {server.steps} steps, {written / seconds:.0f} a second")
    print(f"{server.right} of {server.guessed} drafts were right")
    for mixer, cache in zip(model.mixers, server.caches, strict=True):
        arrays = jax.tree.leaves(cache)
        shapes = " and ".join(str(each.shape) for each in arrays)
        print(f"{type(mixer).__name__} keeps {shapes}, {sum(each.nbytes for each in arrays):,} bytes")
    used = {"slots": server.slots, "pages": server.pages, "pages of the window": server.window_pages}
    print("in use at most:", ", ".join(f"{each.most} of {each.count} {name}" for name, each in used.items()))
    worst = 0.0
    for request in requests:
        alone = Request(request.prompt, request.wanted)
        Server(model, piece=LIMITS.tokens, drafts=0).answer([alone])
        found, expected = np.stack(request.logits), np.stack(alone.logits)
        worst = max(worst, 0.0 if np.array_equal(found, expected) else float(np.abs(found - expected).max()))
    same = "to the bit" if worst == 0 else f"but for {worst:.1e} in logits"
    print(f"every answer is what its request gets alone, one token at a time, {same}")


if __name__ == "__main__":
    main()
