"""One table of calls of the delta rule."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from linear_attention_cases import GATES, PACKED

BETAS = {
    "ordinary": lambda random, shape: random.random(shape),
    "writes nothing": lambda random, shape: np.zeros(shape),
    "replaces": lambda random, shape: np.ones(shape),
    "reflects": lambda random, shape: np.full(shape, 2.0),
    "any": lambda random, shape: random.choice([0, 0.3, 1, 1.7, 2, -0.5], size=shape),
}
KEYS = {
    "ordinary": lambda random, shape: random.normal(size=shape),
    "nearly equal": lambda random, shape: 1 + 1e-3 * random.normal(size=shape),
    "equal": lambda random, shape: np.ones(shape),
}


@dataclass(frozen=True)
class Case:
    """A call: sizes, which gate it has and of what strength, and options passed on as they are. Keys have length 1."""

    name: str
    batch: int = 2
    tokens: int = 70
    heads: int = 2
    own_heads: tuple[int, int, int] = (2, 2, 2)  # of query, key and value
    key_dim: int = 5
    value_dim: int = 3
    gate: str | None = None  # strength
    per_key: bool = False
    beta: str = "ordinary"
    keys: str = "ordinary"
    lengths: tuple[int, ...] | None = None  # packed sequences
    padding: int = 0  # tokens after the last of them
    unbatched: bool = False
    state: str | None = None  # "each" sequence its own or one for "all"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.name.replace(" ", "-")

    @property
    def op(self):
        """The front that takes the call."""
        return "delta_rule" if self.gate is None else "kda" if self.per_key else "gated_delta_rule"

    def arrays(self, dtype=np.float64, seed=0):
        """The array arguments by name; floating ones in `dtype`."""
        random = np.random.default_rng(seed)
        tokens = sum(self.lengths) + self.padding if self.lengths is not None else self.tokens
        batch = 1 if self.lengths is not None else self.batch
        sequences = len(self.lengths) if self.lengths is not None else batch
        lead = (tokens,) if self.unbatched else (batch, tokens)
        query_heads, key_heads, value_heads = self.own_heads
        key = KEYS[self.keys](random, (*lead, key_heads, self.key_dim))
        found = {
            "query": random.normal(size=(*lead, query_heads, self.key_dim)),
            "key": key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), 1e-9),
            "value": random.normal(size=(*lead, value_heads, self.value_dim)),
            "beta": BETAS[self.beta](random, (*lead, self.heads)),
        }
        if self.gate:
            shape = (*lead, self.heads, self.key_dim) if self.per_key else (*lead, self.heads)
            found["g"] = GATES[self.gate](random, shape)
        if self.state:
            shape = (self.heads, self.key_dim, self.value_dim)
            found["initial_state"] = random.normal(size=shape if self.state == "all" else (sequences, *shape))
        found = {name: np.asarray(x).astype(dtype) for name, x in found.items()}
        if self.lengths is not None:
            found["cu_seqlens"] = np.cumsum([0, *self.lengths]).astype(np.int32)
        return found


SHARED = {"heads": 4, "own_heads": (2, 2, 4)}  # as Gated DeltaNet's: values have more heads than queries and keys
HEAD, KEY = {"gate": "ordinary"}, {"gate": "ordinary", "per_key": True}

CASES = [
    Case("no gate", state="each"),
    Case("no gate nothing to start from", tokens=33),
    Case("no gate reverse", state="each", options={"reverse": True, "softmax_scale": 0.3}),
    Case("no gate shared heads", **SHARED, state="all"),
    Case("no gate grouped", heads=4, own_heads=(4, 1, 2), state="each"),
    Case("no gate reflects", beta="reflects", tokens=130, state="each"),
    Case("no gate any beta", beta="any", state="each"),
    Case("no gate writes nothing", beta="writes nothing", state="each"),
    Case("no gate equal keys", keys="equal", beta="any", state="each"),
    Case("no gate nearly equal keys", keys="nearly equal", beta="replaces", tokens=130, state="each"),
    Case("no gate packed", **PACKED, state="each"),
    Case("head", **HEAD, state="each"),
    Case("head replaces", **HEAD, beta="replaces", tokens=129),
    Case("head shared reverse", **HEAD, **SHARED, state="all", options={"reverse": True}),
    Case("head mixed", gate="mixed", beta="any", tokens=100, state="each"),
    Case("head all reset", gate="all -inf", state="each"),
    Case("head positive", gate="positive", tokens=65, state="each"),
    Case("head packed", gate="mixed", **PACKED, state="each"),
    Case("head packed unbatched reverse", **HEAD, **PACKED, **SHARED, unbatched=True, options={"reverse": True}),
    Case("key", **KEY, state="each"),
    Case("key equal keys", **KEY, keys="equal", beta="reflects", state="each"),
    Case("key mixed", gate="mixed", per_key=True, beta="any", tokens=100, state="each"),
    Case("key strong", gate="strong", per_key=True, tokens=128, state="each"),
    Case("key resets", gate="resets", per_key=True, state="each", options={"reverse": True}),
    Case("key all reset", gate="all -inf", per_key=True, state="each"),
    Case("key packed shared", gate="mixed", per_key=True, **PACKED, **SHARED, state="each"),
    Case("key packed of short sequences", **KEY, lengths=(1, 2, 0, 3, 1, 1, 4), padding=1, state="each"),
    Case("key packed empty", **KEY, lengths=(0, 0), padding=3, state="each"),
    Case("one token", **KEY, tokens=1, state="each", **SHARED),
    Case("one token no state", **HEAD, tokens=1),
    Case("one token reset", gate="all -inf", tokens=1, state="each"),
    Case("one packed token", **HEAD, lengths=(0, 1, 0), state="each"),
    Case("no key dims", key_dim=0, **HEAD, tokens=9, state="each", options={"softmax_scale": 0.3}),
    Case("no value dims", value_dim=0, **KEY, **PACKED, state="each"),
]
