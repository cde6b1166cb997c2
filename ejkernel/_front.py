"""What every public op does first: help with keywords of other libraries, and the checks of `ejkernel.debug`."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel import _debug

Front = TypeVar("Front", bound=Callable[..., Any])

# Names that other libraries have for an argument, and its names here, of which the first that the op has counts.
CALLED = {
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "attn_scale": ("softmax_scale",),
    "is_causal": ("causal",),
    "mask": ("attention_mask",),
    "attn_mask": ("attention_mask",),
    "attn_bias": ("bias",),
    "dropout_p": ("dropout_prob",),
    "dropout_rate": ("dropout_prob",),
    "window_size": ("sliding_window",),
    "local_window_size": ("sliding_window",),
    "softcap": ("logits_soft_cap",),
    "logit_cap": ("logits_soft_cap",),
    "logits_soft_capping": ("logits_soft_cap",),
    "sinks": ("softmax_aux",),
    "s_aux": ("softmax_aux",),
    "return_residual": ("return_lse",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse",),
    "block_size": ("block_sizes",),
    "seq_idx": ("segment_ids",),
    "cu_seqlens_q": ("cu_seqlens",),
    "cu_seqlens_k": ("cu_seqlens_kv", "cu_seqlens"),
    "query_offsets": ("query_offset",),
    "implementation": ("platform",),
    "backend": ("platform",),
    "use_qk_l2norm_in_kernel": ("normalize",),
    "initial_states": ("initial_state",),
    "h0": ("initial_state",),
    "gate": ("g",),
    "log_decay": ("g", "g_gamma"),
    "gk": ("g",),
    "gamma": ("g_gamma",),
    "b": ("beta",),
}

# Keywords that mean no argument of the op, and what to do instead.
INSTEAD = {
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), "padding is what has a negative id in 'segment_ids'"),
    **dict.fromkeys(("causal", "is_causal"), "a recurrence is causal; 'reverse' visits the tokens last to first"),
    "output_final_state": "the final state is always returned, after the output",
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
    "use_qk_l2norm_in_kernel": "normalize query and key before the call",
    "use_gate_in_kernel": "compute the log decay 'g' before the call",
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
