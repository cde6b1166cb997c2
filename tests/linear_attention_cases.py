"""One table of calls of the gated linear recurrence."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

GATES = {
    "none": lambda random, shape: np.zeros(shape),
    "tiny": lambda random, shape: -1e-4 * random.random(shape),
    "ordinary": lambda random, shape: -np.abs(random.normal(size=shape)),
    "shipped": lambda random, shape: -5 / (1 + np.exp(-random.normal(size=shape))),  # as Kimi-K3's
    "half shipped": lambda random, shape: 0.5 * GATES["shipped"](random, shape),
    "all -6": lambda random, shape: np.full(shape, -6.0),
    "in turn": lambda random, shape: _in_turn(random, shape),
    "strong": lambda random, shape: -30 * random.random(shape),
    "all -30": lambda random, shape: np.full(shape, -30.0),
    "all -1e4": lambda random, shape: np.full(shape, -1e4),
    "positive": lambda random, shape: 0.05 * random.random(shape),
    "resets": lambda random, shape: np.where(random.random(shape) < 0.1, -np.inf, -0.3 * random.random(shape)),
    "seldom": lambda random, shape: np.where(
        random.random(shape) < 1 / 64 / shape[-1], -np.inf, -0.3 * random.random(shape)
    ),
    "mixed": lambda random, shape: random.choice([0, -1e-3, -0.7, -30, -1e4, -np.inf], size=shape),
    "all -inf": lambda random, shape: np.full(shape, -np.inf),
}


def _in_turn(random, shape):
    """Sixteen tokens of each kind: mild, as shipped, both by dim, and some strong ones or resets among them."""
    kind = np.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2)) // 16 % 4
    mild, shipped = (GATES[name](random, shape) for name in ("tiny", "shipped"))
    both = np.where(np.arange(shape[-1]) % 3 == 0, mild, shipped)
    strong = np.where(random.random(shape) < 0.1, random.choice([-30, -1e4, -np.inf], size=shape), both)
    return np.select([kind == 0, kind == 1, kind == 2], [mild, shipped, both], strong)


@dataclass(frozen=True)
class Case:
    """A call: sizes, which gates it has and of what strength, and options passed on as they are."""

    name: str
    batch: int = 2
    tokens: int = 70
    heads: int = 2
    kv_heads: int = 2
    shared: tuple[int, int, int] | None = None  # heads of query, key and value, instead of `heads` and `kv_heads`
    key_dim: int = 5
    value_dim: int = 3
    gates: dict[str, str] = field(default_factory=dict)  # argument to strength
    gamma_shape: str = "BH"  # or "1H" or "H"
    narrow: tuple[str, ...] = ()  # gates with one number a head
    lengths: tuple[int, ...] | None = None  # packed sequences
    padding: int = 0  # tokens after the last of them
    unbatched: bool = False
    state: str | None = None  # "each" sequence its own or one for "all"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.name.replace(" ", "-")

    def arrays(self, dtype=np.float64, seed=0):
        """The array arguments by name; floating ones in `dtype`."""
        random = np.random.default_rng(seed)
        tokens = sum(self.lengths) + self.padding if self.lengths is not None else self.tokens
        batch = 1 if self.lengths is not None else self.batch
        sequences = len(self.lengths) if self.lengths is not None else batch
        lead = (tokens,) if self.unbatched else (batch, tokens)
        of_query, of_key, of_value = self.shared or (self.heads, self.kv_heads, self.kv_heads)
        found = {
            "query": random.normal(size=(*lead, of_query, self.key_dim)),
            "key": random.normal(size=(*lead, of_key, self.key_dim)),
            "value": random.normal(size=(*lead, of_value, self.value_dim)),
        }
        for name, strength in self.gates.items():
            dim = 1 if name in self.narrow else self.value_dim if name == "gv" else self.key_dim
            gamma = {"H": (self.heads,), "1H": (1, self.heads), "BH": (sequences, self.heads)}[self.gamma_shape]
            found[name] = GATES[strength](random, gamma if name == "g_gamma" else (*lead, self.heads, dim))
        if self.state:
            shape = (self.heads, self.key_dim, self.value_dim)
            found["initial_state"] = random.normal(size=shape if self.state == "all" else (sequences, *shape))
        found = {name: x.astype(dtype) for name, x in found.items()}
        if self.lengths is not None:
            found["cu_seqlens"] = np.cumsum([0, *self.lengths]).astype(np.int32)
        return found


KEY = {"gates": {"g": "ordinary"}}
GROUPED = {"heads": 4, "kv_heads": 2}
MAMBA = {"heads": 4, "shared": (1, 1, 4)}
PACKED = {"lengths": (3, 0, 64, 1, 29), "padding": 4}

# rows of one size are fed to one program
CASES = [
    Case("no decay"),
    Case("no decay grouped", **GROUPED, state="each"),
    Case("gamma", gates={"g_gamma": "ordinary"}, state="each"),
    Case("gamma for all rows", gates={"g_gamma": "ordinary"}, gamma_shape="H", state="all"),
    Case("gamma 1H reverse", gates={"g_gamma": "ordinary"}, gamma_shape="1H", options={"reverse": True}),
    Case("gamma packed", gates={"g_gamma": "ordinary"}, **PACKED, state="each"),
    Case("gamma packed reverse", gates={"g_gamma": "strong"}, **PACKED, options={"reverse": True}),
    Case("one gate a head", gates={"g": "ordinary"}, narrow=("g",), tokens=130, state="each"),
    Case("one gate a head mixed", gates={"g": "mixed"}, narrow=("g",), tokens=130, state="each"),
    Case("one gate a head all reset", gates={"g": "all -inf"}, narrow=("g",), tokens=130, state="each"),
    Case("g", **KEY, state="each"),
    Case("g grouped reverse", **KEY, **GROUPED, state="all", options={"reverse": True, "softmax_scale": 0.3}),
    Case("g none", gates={"g": "none"}),
    Case("g tiny", gates={"g": "tiny"}, tokens=129),
    Case("g strong", gates={"g": "strong"}, tokens=128),
    Case("g positive", gates={"g": "positive"}, tokens=65),
    Case("g resets", gates={"g": "resets"}, state="each"),
    Case("g mixed", gates={"g": "mixed"}, tokens=100, state="each"),
    Case("g mixed reverse packed", gates={"g": "mixed"}, **PACKED, state="each", options={"reverse": True}),
    Case("g all reset", gates={"g": "all -inf"}, state="each"),
    Case("g packed unbatched grouped", **KEY, **PACKED, **GROUPED, unbatched=True, state="each"),
    Case("g packed one state for all", **KEY, lengths=(40, 25), unbatched=True, state="all"),
    Case("g packed of short sequences", **KEY, lengths=(1, 2, 0, 3, 1, 1, 4), padding=1, state="each"),
    Case("g packed empty", **KEY, lengths=(0, 0), padding=3, state="each"),
    Case("g gk gamma", gates={"g": "ordinary", "gk": "strong", "g_gamma": "tiny"}, narrow=("gk",)),
    Case("g gamma packed", gates={"g": "ordinary", "g_gamma": "ordinary"}, **PACKED, state="each"),
    Case("gk", gates={"gk": "ordinary"}, tokens=9),
    Case("gv", gates={"gv": "ordinary"}, state="each", **GROUPED),
    Case("gv one a head", gates={"gv": "ordinary"}, narrow=("gv",), tokens=33),
    Case("gv gamma", gates={"gv": "strong", "g_gamma": "ordinary"}, tokens=65, options={"reverse": True}),
    Case("all gates mixed", gates=dict.fromkeys(("g", "gk", "gv"), "mixed") | {"g_gamma": "tiny"}, state="each"),
    Case("all gates packed", gates=dict.fromkeys(("g", "gk", "gv", "g_gamma"), "ordinary"), **PACKED, state="each"),
    Case("gamma shared queries and keys", gates={"g_gamma": "ordinary"}, **MAMBA, state="each"),
    Case(
        "one gate a head shared queries and keys", gates={"g": "mixed"}, narrow=("g",), **PACKED, **MAMBA, state="each"
    ),
    Case("g shared by each", **KEY, heads=6, shared=(2, 6, 3), state="all", options={"reverse": True}),
    Case("all gates shared by each", gates=dict.fromkeys(("g", "gv"), "ordinary"), heads=4, shared=(2, 1, 4), **PACKED),
    Case("one token shared", tokens=1, gates={"g": "ordinary"}, heads=4, shared=(2, 4, 1), state="each"),
    Case("one token", tokens=1, gates={"g": "ordinary", "gv": "ordinary"}, state="each", **GROUPED),
    Case("one token gamma", tokens=1, gates={"g_gamma": "ordinary"}, state="each"),
    Case("one token no state", tokens=1, gates={"g": "ordinary"}),
    Case("one token reset", tokens=1, gates={"g": "all -inf"}, state="each"),
    Case("one packed token", **KEY, lengths=(0, 1, 0), state="each"),
    Case("no key dims", key_dim=0, gates={"g": "ordinary"}, tokens=9, state="each", options={"softmax_scale": 0.3}),
    Case("no value dims", value_dim=0, **KEY, **PACKED, state="each"),
]
