"""Random schedules of many requests against each request alone: the same bits, token by token.

Requests are admitted to slots and pages, their prompts are cut, tokens follow one by one or as drafts of which some are
rejected, requests are evicted and start anew, and some begin with the prompt of another. What a model would compute is
drawn before: a request is a stream of queries, keys, values and gates.
"""

import itertools

import jax
import numpy as np

import ejkernel

H, KV, D = 2, 1, 8
SLOTS, PAGES, PAGE, SHARED = 16, 40, 32, 128
T, N, LONGEST = 320, 4, 288  # of every call: tokens, sequences, and the most tokens of a request
DRAFTS = 3
SHAPES = {"query": (H, D), "key": (H, D), "value": (H, D), "g": (H, D), "beta": (H,), "k": (KV, D), "v": (KV, D)}


def streams(rng, count):
    """A request: the arrays of its tokens by name."""
    drawn = {name: rng.normal(size=(count, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    drawn["g"], drawn["beta"] = -np.log1p(np.exp(-drawn["g"])), 1 / (1 + np.exp(-drawn["beta"]))
    return drawn


def ops(caches, tokens, table, lengths, borders, reads, writes, at):
    """Four ops on the same tokens; `caches` are three pools and pages."""
    gla, delta, recent, pages = caches
    slots = {"cu_seqlens": borders, "reads": reads, "writes": writes, "at": at}
    query, key, value, g = (tokens[name] for name in ("query", "key", "value", "g"))
    first, gla = ejkernel.recurrent_gla(query, key, value, g, states=gla, **slots)
    second, delta = ejkernel.gated_delta_rule(
        query, key, value, g[..., 0], tokens["beta"], normalize=True, states=delta, **slots
    )
    taps = np.linspace(-1, 1, 4 * H * D, dtype=np.float32).reshape(4, H * D)
    third, recent = ejkernel.causal_conv1d(value.reshape(-1, H * D), taps, None, "silu", states=recent, **slots)
    fourth, pages = ejkernel.paged_attention(query, tokens["k"], tokens["v"], pages, table, lengths, borders)
    return (first, second, third, fourth), (gla, delta, recent, pages)


def attention(caches, tokens, table, lengths, borders, reads, writes, at):
    """Attention alone, as a step of the same kind."""
    query, key, value = (tokens[name] for name in ("query", "k", "v"))
    output, pages = ejkernel.paged_attention(query, key, value, caches[-1], table, lengths, borders)
    return (output,), (*caches[:-1], pages)


def empty_caches():
    """Full of NaN, which nobody may see."""
    states = np.full((SLOTS, H, D, D), np.nan, np.float32)
    pages = np.full((PAGES, PAGE, KV, D), np.nan, np.float32)
    recent = np.full((SLOTS, 3, H * D), np.nan, np.float32)
    return states, states, recent, ejkernel.PagedCache(pages, pages)


def call(step, caches, parts):
    """One step of `parts`: tokens of a request, its table, length, slot that is read, slots that are written, at."""
    borders = np.zeros(N + 1, np.int32)
    table, lengths = np.full((N, LONGEST // PAGE + 1), -1, np.int32), np.zeros(N, np.int32)
    reads, writes = np.full(N, -1, np.int32), np.full((N, DRAFTS), -1, np.int32)
    at = np.full((N, DRAFTS), -1, np.int32)
    for n, (tokens, pages, length, read, written, after) in enumerate(parts):
        borders[n + 1 :] = borders[n] + len(tokens["query"])
        table[n, : len(pages)], lengths[n], reads[n] = pages, length, read
        writes[n, : len(written)], at[n, : len(after)] = written, after
    rows = {}
    for name, shape in SHAPES.items():
        rows[name] = np.full((T, *shape), np.nan, np.float32)
        rows[name][: borders[-1]] = np.concatenate([tokens[name] for tokens, *_ in parts])
    outputs, caches = step(caches, rows, table, lengths, borders, reads, writes, at)
    outputs = [np.asarray(each) for each in outputs]
    cut = [[each[low:high] for each in outputs] for low, high in itertools.pairwise(borders)]
    return cut[: len(parts)], caches


def alone(step, request):
    """The outputs of a whole request in one step."""
    count = len(request["query"])
    pages = list(range(-(-count // PAGE)))
    (outputs,), _ = call(step, empty_caches(), [(request, pages, 0, -1, [], [])])
    return outputs


class Server:
    """Slots and pages, who has them, and what came out so far."""

    def __init__(self, rng, step):
        self.rng, self.step, self.caches = rng, step, empty_caches()
        self.slots, self.pages = list(rng.permutation(SLOTS)), list(rng.permutation(PAGES))
        self.active, self.done, self.prefix = {}, {}, None

    def admit(self, name, request, prompt, shared):
        """`shared`: its first tokens are the prefix, of which state and pages are there already."""
        pages, length, slot, outputs = [], 0, -1, []
        if shared and self.prefix is not None:
            slot, pages, outputs = self.prefix[0], list(self.prefix[1]), [self.prefix[2]]
            length = SHARED
        self.active[name] = {
            "request": request, "prompt": prompt, "read": slot, "own": [], "pages": pages,
            "fixed": len(pages), "length": length, "outputs": outputs,
        }  # fmt: skip

    def evict(self, name):
        found = self.active.pop(name)
        self.slots += found["own"]
        self.pages += found["pages"][found["fixed"] :]
        return found

    def plan(self, name):
        """A piece of a request: real tokens, and drafts that are wrong behind them."""
        found = self.active[name]
        request, length, prompt = found["request"], found["length"], found["prompt"]
        count = len(request["query"])
        if length < prompt:
            cut = SHARED - length % SHARED
            high = min(prompt, length + (cut if self.rng.random() < 0.6 else prompt))
            return {key: x[length:high] for key, x in request.items()}, high - length
        right = min(int(self.rng.integers(1, DRAFTS + 1)), count - length)
        wrong = int(self.rng.integers(0, DRAFTS + 1 - right))
        garbage = streams(self.rng, wrong)
        return {k: np.concatenate([x[length : length + right], garbage[k]]) for k, x in request.items()}, right

    def run(self, names):
        """One call; of drafts, the state after each is kept, and that after the last right one is the request's."""
        parts, kept, room = [], [], T
        for name in names:
            tokens, right = self.plan(name)
            size = len(tokens["query"])
            if size > room:
                continue
            found, room = self.active[name], room - size
            while len(found["pages"]) * PAGE < found["length"] + size:
                found["pages"].append(self.pages.pop())
            after = list(range(1, size + 1)) if found["length"] >= found["prompt"] else [right]
            slots = [self.slots.pop() for _ in after]
            parts.append((tokens, found["pages"], found["length"], found["read"], slots, after))
            kept.append((name, right, slots, slots[after.index(right)]))
        outputs, self.caches = call(self.step, self.caches, parts)
        for (name, right, slots, slot), each in zip(kept, outputs, strict=True):
            found = self.active[name]
            self.slots += [*found["own"], *(other for other in slots if other != slot)]
            found["own"], found["read"] = [slot], slot
            found["length"] += right
            found["outputs"].append([x[:right] for x in each])
            if found["length"] == len(found["request"]["query"]):
                self.done[name] = self.evict(name)["outputs"]


def test_random_schedules_give_each_request_what_it_gets_alone():
    step = jax.jit(ops)
    for seed in range(40):
        follow_a_schedule(np.random.default_rng(seed), step, 7, 260)


def follow_a_schedule(rng, step, count, longest):
    """Serves `count` requests with prompts of fewer than `longest` tokens behind those that are shared."""
    prefix = streams(rng, SHARED)
    server = Server(rng, step)
    pages, slot = [server.pages.pop() for _ in range(SHARED // PAGE)], server.slots.pop()
    (found,), server.caches = call(step, server.caches, [(prefix, pages, 0, -1, [slot], [SHARED])])
    server.prefix = slot, pages, found
    requests = {}
    for name in range(count):
        shared = rng.random() < 0.4
        prompt = int(rng.integers(1, longest)) + (SHARED if shared else 0)
        prompt = min(prompt, LONGEST - 8)
        request = streams(rng, prompt + int(rng.integers(2, 8)))
        if shared:
            request = {key: np.concatenate([prefix[key], x[SHARED:]]) for key, x in request.items()}
        requests[name] = request, prompt, shared
    waiting = list(requests)
    for _ in range(200):
        if len(server.done) == len(requests):
            break
        while waiting and len(server.active) < 3:
            name = waiting.pop(0)
            server.admit(name, *requests[name])
        if server.active and rng.random() < 0.1:
            name = rng.choice(list(server.active))
            server.evict(name)
            waiting.append(name)
            continue
        order = rng.permutation(list(server.active))
        server.run([int(each) for each in order[: rng.integers(1, len(order) + 1)]])
    assert len(server.done) == len(requests)
    for name, outputs in server.done.items():
        for op, (pieces, whole) in enumerate(
            zip(zip(*outputs, strict=True), alone(step, requests[name][0]), strict=True)
        ):
            np.testing.assert_array_equal(np.concatenate(pieces), whole, err_msg=f"request {name}, op {op}")
