"""What every public op does first: help with keywords of other libraries, and the checks of `ejkernel.debug`."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel import _debug

Front = TypeVar("Front", bound=Callable[..., Any])

# The arguments of ops, and what other libraries call them. A word that stands twice means the first that an op has.
OTHER_WORDS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "softmax_scale": "scale sm_scale attn_scale",
    "causal": "is_causal",
    "attention_mask": "mask attn_mask",
    "bias": "attn_bias",
    "dropout_prob": "dropout_p dropout_rate",
    "sliding_window": "window_size local_window_size",
    "logits_soft_cap": "softcap logit_cap logits_soft_capping",
    "softmax_aux": "sinks s_aux",
    "return_lse": "return_residual return_softmax_lse return_attn_probs",
    "block_sizes": "block_size",
    "segment_ids": "seq_idx",
    "cu_seqlens_kv": "cu_seqlens_k",
    "cu_seqlens": "cu_seqlens_q cu_seqlens_k query_start_loc",
    "query_offset": "query_offsets",
    "platform": "implementation backend",
    "normalize": "use_qk_l2norm_in_kernel",
    "initial_state": "initial_states h0 conv_state",
    "g": "gate log_decay gk",
    "g_gamma": "log_decay gamma",
    "beta": "b",
}
CALLED = {
    word: [name for name, words in OTHER_WORDS.items() if word in words.split()]
    for word in " ".join(OTHER_WORDS.values()).split()
}

# Keywords that mean no argument of the op, and what to do instead.
INSTEAD = {
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), "padding is what has a negative id in 'segment_ids'"),
    **dict.fromkeys(("causal", "is_causal"), "a recurrence is causal; 'reverse' visits the tokens last to first"),
    **dict.fromkeys(
        ("output_final_state", "return_final_states"), "the final state is always returned, after the output"
    ),
    "head_first": "arrays are [B, T, H, D], heads after time",
    "enable_gqa": "key and value may have fewer heads than the query, without being asked to",
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "not needed: 'cu_seqlens' says it all"),
    **dict.fromkeys(("segment_ids", "seq_idx"), "ejkernel.flash_attention takes rows of several sequences"),
    **dict.fromkeys(
        ("query_seq_lengths", "key_value_seq_lengths"),
        "padding is what has a negative id in 'segment_ids', or pack the sequences with 'cu_seqlens'",
    ),
    "alibi_slopes": "give what they make as 'bias'",
    "chunk_size": "the library chooses it",
    **dict.fromkeys(("num_heads", "head_dim"), "the library reads it from the arrays' shapes"),
    "qkv": "query, key and value are arrays of their own",
    "precision": "products of float32 arrays are computed in float32",
    "use_qk_l2norm_in_kernel": "normalize query and key before the call",
    **dict.fromkeys(
        ("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound", "safe_gate"),
        "compute the log decay 'g' before the call; none is too strong",
    ),
    **dict.fromkeys(("decay", "decays"), "this library takes logs of decays, in the arguments that begin with 'g'"),
    **dict.fromkeys(("need_weights", "output_attentions"), "ejkernel.attention returns its weights"),
    "return_lse": "ejkernel.flash_attention returns it",
    "cu_seqlens": "ejkernel.flash_attention takes packed sequences",
    **dict.fromkeys(
        ("g", "gk", "gv", "g_gamma"), "ejkernel.recurrent takes every gate, gated_delta_rule and kda a 'g'"
    ),
}


def public(front: Front) -> Front:
    """Makes `front` a public op: unknown keywords are an error that names the right one, and `debug` sees its values.

    The signature, the docstring and the types stay those of `front`.
    """
    signature = inspect.signature(front)
    names = frozenset(signature.parameters)

    @functools.wraps(front)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= names:
            word = next(each for each in kwargs if each not in names)
            message = f"{front.__name__}() got an unexpected keyword argument {word!r}"
            raise TypeError(f"{message}{_hint(word, names)}")
        if (problems := _debug.current_problems()) is not None:
            _debug.check_values(problems, front.__name__, signature.bind(*args, **kwargs).arguments)
        return front(*args, **kwargs)

    return call  # type: ignore[return-value]


def _hint(word: str, names: frozenset[str]) -> str:
    """What to add to Python's own message about an unknown keyword."""
    for name in CALLED.get(word, ()):
        if name in names:
            return f"; this library calls it {name!r}"
    if word in INSTEAD:
        return f"; {INSTEAD[word]}"
    close = difflib.get_close_matches(word, sorted(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
