"""Every derivative of an op that goes through `_differentiable`, and every composition of them, beside plain JAX."""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ejkernel.kernels._differentiable import SAVED, call
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op, by_jvp


class Inputs(NamedTuple):
    x: Any
    y: Any
    count: Any  # integers have no tangent
    absent: Any = None


def plain(static, inputs):
    return {"product": jnp.sin(inputs.x) * inputs.y**static * inputs.count, "sum": 3 * inputs.y}


def with_residuals(static, inputs):
    return plain(static, inputs), (jnp.cos(inputs.x),)


def backward(static, inputs, residuals, cotangents, wanted):
    (outputs, (cosine,)), d_product, d_sum = residuals, cotangents["product"], cotangents["sum"]
    d_product = jnp.zeros_like(inputs.x) if d_product is None else d_product
    dx = cosine * inputs.y**static * inputs.count * d_product
    dy = outputs["product"] * static / inputs.y * d_product + (0 if d_sum is None else 3 * d_sum)
    # what is not asked for must not be missed
    return Inputs(dx if wanted.x else None, dy if wanted.y else None, None)


def folded(static, size, inputs, mapped, wanted):
    return static, fold_rows(inputs, size, mapped)


def one_by_one(static, size, inputs, mapped, wanted):
    return None


def op(**options):
    return Op(plain, plain, with_residuals, backward, keeps=lambda outputs: outputs, **options)


OPS = {"vmap": op(), "fold": op(fold=folded), "loop": op(fold=one_by_one), "tangent": op(tangent=by_jvp(plain))}
X = jnp.linspace(0.1, 1, 6)
Y = X[::-1] + 1
XS, YS = jnp.stack([X, 2 * X, 3 * X]), jnp.stack([Y, 2 * Y, Y - 0.5])


def function(run, output="product"):
    return lambda x, y: run(2, Inputs(x, y, jnp.full(x.shape, 2)))[output]


def loss(f):
    return lambda x, y: (f(x, y) ** 3).sum()


def slope(f):
    """A loss of the outputs and of their tangents."""
    return lambda x, y: sum((each**2).sum() for each in jax.jvp(f, (x, y), (y, x)))


def scan(f):
    return lambda x, y: jax.lax.scan(lambda carry, _: (f(carry, y), None), x, None, length=3)[0].sum()


def mapped_over_mesh(f, check_vma):
    mesh, spec = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,)), PartitionSpec("a")
    run = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma)
    return lambda x, y: run(x, y).sum()


def grad_of_grad(f):
    return jax.grad(lambda x, y: (jax.grad(loss(f))(x, y) ** 2).sum(), (0, 1))


NAMED = jax.checkpoint_policies.save_only_these_names(SAVED)
CASES = {
    "jvp": lambda f: jax.jvp(f, (X, Y), (Y, X)),
    "jvp of one": lambda f: jax.jvp(lambda y: f(X, y), (Y,), (X,)),
    "linearize": lambda f: jax.linearize(f, X, Y)[1](Y, X),
    "grad": lambda f: jax.grad(loss(f), (0, 1))(X, Y),
    "grad of one": lambda f: jax.grad(loss(f), 1)(X, Y),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1))(X, Y),
    "jacrev": lambda f: jax.jacrev(f, (0, 1))(X, Y),
    "hessian": lambda f: jax.hessian(loss(f), (0, 1))(X, Y),
    "grad of grad": lambda f: grad_of_grad(f)(X, Y),
    "jvp of grad": lambda f: jax.jvp(lambda x: jax.grad(loss(f))(x, Y), (X,), (Y,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(lambda y: f(x, y), (Y,), (x,))[1].sum())(X),
    "third": lambda f: jax.grad(lambda x: grad_of_grad(f)(x, Y)[0].sum())(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)))(XS, YS),
    "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(lambda y: f(x, y), (Y,), (x,))[1])(XS),
    "vmap of grad, one shared": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(XS, Y),
    "grad of vmap, one shared": lambda f: jax.grad(lambda y: (jax.vmap(f, (0, None))(XS, y) ** 3).sum())(Y),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(loss(f), (0, 1)))(XS, YS),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(jax.grad(loss(f), (0, 1)), (0, None)), (None, 0))(XS, YS),
    "vmap of jit": lambda f: jax.vmap(jax.jit(grad_of_grad(f)))(XS, YS),
    "vmap along the last axis": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (1, 1))(XS, YS),
    "scan": lambda f: jax.grad(scan(f), (0, 1))(X, Y),
    "jvp of scan": lambda f: jax.jvp(scan(f), (X, Y), (Y, X)),
    "checkpoint": lambda f: jax.grad(lambda x, y: jax.checkpoint(lambda x: f(f(x, y), y))(x).sum(), (0, 1))(X, Y),
    "jvp of checkpoint": lambda f: jax.jvp(jax.checkpoint(f), (X, Y), (Y, X)),
    "grad of checkpoint of jvp": lambda f: jax.grad(jax.checkpoint(slope(f)), (0, 1))(X, Y),
    "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(loss(f)))(X, Y),
    "saved names": lambda f: jax.grad(jax.checkpoint(loss(lambda x, y: f(f(x, y), y)), policy=NAMED), (0, 1))(X, Y),
    "saved names of jvp": lambda f: jax.grad(jax.checkpoint(slope(f), policy=NAMED), (0, 1))(X, Y),
    "linearize of jvp": lambda f: jax.linearize(slope(f), X, Y)[1](Y, X),
    "grad of scan of jvp": lambda f: jax.grad(scan(lambda x, y: jax.jvp(f, (x, y), (y, x))[1]), (0, 1))(X, Y),
    "shard_map": lambda f: jax.grad(mapped_over_mesh(f, False), (0, 1))(X, Y),
    "shard_map, checked": lambda f: jax.grad(mapped_over_mesh(f, True), (0, 1))(X, Y),
    "hessian of shard_map": lambda f: jax.hessian(mapped_over_mesh(f, True), (0, 1))(X, Y),
    "vmap of shard_map": lambda f: jax.vmap(jax.grad(mapped_over_mesh(f, True), (0, 1)))(XS, YS),
}


@functools.cache
def expected(case, output):
    """What JAX makes of the same function in plain JAX: one answer for all ops."""
    return jax.jit(partial(CASES[case], function(plain, output)))()


@pytest.mark.parametrize(("name", "jit"), [*((name, True) for name in OPS), ("fold", False)])
def test_compositions(name, jit):
    for case, derivative in CASES.items():
        for output in ("product", "sum")[: 1 + jit]:
            run = partial(derivative, function(partial(call, OPS[name]), output))
            got = (jax.jit(run) if jit else run)()
            want = expected(case, output)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"{case} of {output}")


def test_reverse_mode_runs_the_op_itself():
    """Neither the reference nor its tangents are in a gradient's program, and residuals are computed once."""

    def forbidden(*_):
        raise AssertionError("the reference was traced")

    kernels = Op(plain, forbidden, with_residuals, backward, keeps=lambda outputs: outputs)
    gradient = jax.jit(jax.grad(loss(function(partial(call, kernels))), (0, 1)))
    assert gradient.lower(X, Y).as_text().count("stablehlo.cosine") == 1


def marked(static, inputs):
    """The op's forward pass, which programs show by a `tanh`."""
    outputs = plain(static, inputs)
    return {**outputs, "product": outputs["product"] + 0 * jnp.tanh(inputs.x)}, (jnp.cos(inputs.x),)


def test_forward_mode_computes_the_outputs_once():
    """They come with the tangents, and XLA removes the forward pass; where tangents come later, it stays."""
    op = Op(lambda *x: marked(*x)[0], plain, marked, backward, keeps=lambda outputs: outputs)
    f = function(partial(call, op))

    def program(run):
        return jax.jit(run).lower(X, Y).compile().as_text()

    assert "tanh" not in program(lambda x, y: jax.jvp(f, (x, y), (y, x)))
    assert "tanh" in program(lambda x, y: jax.linearize(f, x, y)[0])
    assert "tanh" in program(jax.grad(loss(f), (0, 1)))


def test_an_op_with_a_tangent_pass():
    """It gets residuals, `None` for what has no tangent, and serves linearizing too."""
    seen = []

    def tangent(static, inputs, residuals, tangents):
        outputs, (cosine,) = residuals
        seen.append(tuple(each is not None for each in tangents))
        dx, dy = (0 if each is None else each for each in tangents[:2])
        slope = cosine * dx * inputs.y**static * inputs.count + outputs["product"] * static / inputs.y * dy
        return outputs, {"product": slope, "sum": 3 * dy + jnp.zeros_like(inputs.y)}

    def forbidden(*_):
        raise AssertionError("the reference was traced")

    op = Op(plain, forbidden, with_residuals, backward, tangent, keeps=lambda outputs: outputs)
    f, g = function(partial(call, op)), function(plain)
    for name in ("jvp", "jvp of one", "linearize", "jacfwd", "vmap of jvp", "jvp of scan", "jvp of checkpoint", "grad"):
        for a, b in zip(jax.tree.leaves(CASES[name](f)), jax.tree.leaves(CASES[name](g)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)
    assert set(seen) == {(True, True, False, False), (False, True, False, False)}


def test_a_cotangent_that_nobody_gives_is_none():
    seen = []

    def record(static, inputs, residuals, cotangents, wanted):
        seen.append((cotangents["product"] is None, cotangents["sum"] is None, wanted))
        return backward(static, inputs, residuals, cotangents, wanted)

    recording = Op(plain, plain, with_residuals, record, keeps=lambda outputs: outputs)
    jax.grad(lambda x: function(partial(call, recording))(x, Y).sum())(X)
    assert seen == [(False, True, Inputs(True, False, False))]
