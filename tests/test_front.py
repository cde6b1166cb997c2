"""What every public op does before its own code: words of other libraries, signatures, documentation."""

import inspect
import re
import typing

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel import parallel
from ejkernel._front import CALLED, INSTEAD
from ejkernel._ops import OPS

X = np.ones((1, 4, 2, 8), np.float32)
FRONTS = {
    **{name: getattr(ejkernel, name) for name in OPS},
    **{f"parallel.{name}": getattr(parallel, name) for name in parallel.__all__},
}


def test_the_wrapper_keeps_what_tools_read():
    for name, front in FRONTS.items():
        assert name.endswith(front.__name__) and front.__doc__ == front.__wrapped__.__doc__
        signature = inspect.signature(front)
        assert signature == inspect.signature(front.__wrapped__)
        assert not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()), name
    assert jax.jit(ejkernel.retention, static_argnames="reverse")(X, X, X, reverse=True)[0].shape == X.shape


SAID = [
    ("recurrent_gla", "scale", "this library calls it 'softmax_scale'"),
    ("flash_attention", "sm_scale", "this library calls it 'softmax_scale'"),
    ("flash_attention", "is_causal", "this library calls it 'causal'"),
    ("flash_attention", "mask", "this library calls it 'attention_mask'"),
    ("attention", "attn_mask", "this library calls it 'attention_mask'"),
    ("recurrent_gla", "mask", "padding is what has a negative id in 'segment_ids'"),
    ("kda", "output_final_state", "the final state is always returned, after the output"),
    ("causal_conv1d", "return_final_states", "the final state is always returned, after the output"),
    ("causal_conv1d", "conv_state", "this library calls it 'initial_state'"),
    ("causal_conv1d", "query_start_loc", "this library calls it 'cu_seqlens'"),
    ("kda", "A_log", "compute the log decay 'g' before the call; none is too strong"),
    ("recurrent_gla", "decay", "this library takes logs of decays, in the arguments that begin with 'g'"),
    ("flash_attention", "num_heads", "the library reads it from the arrays' shapes"),
    ("kda", "use_qk_l2norm_in_kernel", "this library calls it 'normalize'"),
    ("simple_gla", "use_qk_l2norm_in_kernel", "normalize query and key before the call"),
    ("attention", "dropout_p", "this library calls it 'dropout_prob'"),
    ("flash_attention", "cu_seqlens_k", "this library calls it 'cu_seqlens_kv'"),
    ("retention", "cu_seqlens_k", "this library calls it 'cu_seqlens'"),
    ("parallel.recurrent_gla", "scale", "this library calls it 'softmax_scale'"),
    ("parallel.flash_attention", "is_causal", "this library calls it 'causal'"),
    ("delta_rule", "g", "ejkernel.recurrent takes every gate, gated_delta_rule and kda a 'g'"),
    ("retention", "revers", "did you mean 'reverse'?"),
]


@pytest.mark.parametrize("name, word, said", SAID)
def test_words_of_other_libraries_are_told_what_they_are_called_here(name, word, said):
    front = FRONTS[name]
    with pytest.raises(TypeError) as error:
        front(X, X, X, **{word: None})
    assert str(error.value) == f"{front.__name__}() got an unexpected keyword argument {word!r}; {said}"


def test_a_word_that_means_nothing_is_only_refused():
    with pytest.raises(TypeError, match=r"^retention\(\) got an unexpected keyword argument 'zzz'$"):
        ejkernel.retention(X, X, X, zzz=1)


@pytest.mark.parametrize("word", [*CALLED, *INSTEAD])
def test_every_word_has_an_answer_in_some_op(word):
    """And its answer names only arguments and ops that are there."""
    answers = set()
    for front in FRONTS.values():
        if word not in inspect.signature(front).parameters:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'") as error:
                front(**{word: None})
            answers.add(str(error.value).partition("; ")[2])
    expected = {f"this library calls it {name!r}" for name in CALLED.get(word, ())} | {INSTEAD.get(word)}
    assert answers & expected
    arguments = {name for front in FRONTS.values() for name in inspect.signature(front).parameters}
    assert set(CALLED.get(word, ())) <= arguments


def test_python_itself_tells_of_arguments_that_are_missing():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'g'"):
        ejkernel.simple_gla(X, X, X)


def described(front):
    """What a docstring says of each argument, on one line, by name and in order."""
    section = re.search(r"^    Args:\n(.*?)(?:\n\n|\Z)", front.__doc__, re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^        (\w+): (.*?)(?=\n        \w|\Z)", section[1], re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


@pytest.mark.parametrize("front", FRONTS.values(), ids=list(FRONTS))
def test_every_argument_is_documented_where_editors_show_it(front):
    assert list(described(front)) == list(inspect.signature(front).parameters)
    assert typing.get_type_hints(front).keys() == {*inspect.signature(front).parameters, "return"}


# what an argument means depends on the op
OF_ITS_OWN = {
    ("simple_gla", "g"),
    ("gated_delta_rule", "g"),
    ("kda", "g"),
    ("flash_attention", "dtype"),
    *(("paged_attention", name) for name in ("query", "key", "value", "sliding_window")),
}


@pytest.mark.parametrize("name", [name for name in FRONTS if "balanced" not in name])
def test_an_argument_is_described_in_the_same_words_everywhere(name):
    """Those of its family's first op, or of the op that is sharded, perhaps with a sentence of its own behind them."""
    op = OPS[name.removeprefix("parallel.")]
    first = {"linear recurrence": "recurrent", "delta rule": "delta_rule", "softmax": "attention"}.get(op.core, op.name)
    source = op.name if name.startswith("parallel.") else first
    words = described(FRONTS[source])
    for argument, text in described(FRONTS[name]).items():
        if (
            (source == op.name or (op.name, argument) not in OF_ITS_OWN)
            and argument != "platform"
            and argument in words
        ):
            common = words[argument].partition(". ")[0].removesuffix(".")
            full = op.core == "softmax"  # whose packed calls have more to say
            assert text.startswith(common if full else words[argument]), argument


def test_the_overloads_of_flash_attention_take_what_it_takes():
    known = inspect.signature(ejkernel.flash_attention).parameters
    *overloads, _ = typing.get_overloads(ejkernel.flash_attention.__wrapped__)
    assert len(overloads) == 2
    for each in overloads:
        parameters = inspect.signature(each).parameters
        assert list(parameters) == list(known)
        for name in known.keys() - {"return_lse"}:
            assert parameters[name] == known[name]


def test_signatures_name_their_aliases():
    for front in FRONTS.values():
        text = str(inspect.signature(front))
        assert "Borders" in text or "cu_seqlens" not in text
        assert "numpy.ndarray" not in text


def test_the_first_lines_say_in_which_dtype_results_come():
    for front, said in (
        (ejkernel.attention, "bfloat16 unless `dtype`"),
        (ejkernel.flash_attention, "the query's dtype"),
    ):
        assert said in " ".join(front.__doc__.splitlines()[:3])
