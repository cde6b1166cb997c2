"""Runs the library's Triton kernels on the CPU, in Triton's interpreter, in place of `_launch.launch`.

Tests that say `pytestmark = MARKS` and run within `kernels()` run on an NVIDIA GPU instead, if there is one.
"""

import contextlib
import dataclasses
import functools
import re
import sys
import threading
import warnings
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import ejkernel
from ejkernel.kernels import _launch, _varying

ROOT = Path(ejkernel.__file__).parent
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint32": "u32", "bool": "i1"}

GPU = _launch.capability() is not None
MARKS = [pytest.mark.gpu] if GPU else []


@contextlib.contextmanager
def kernels():
    """Within this, Triton kernels run: on the GPU if there is one, else in the interpreter."""
    with jax.default_matmul_precision("highest") if GPU else interpreted():
        yield


def device_modules():
    """Names of the library's modules of device code: those that import Triton at their top."""
    for path in ROOT.rglob("*.py"):
        if re.search(r"^import triton$", path.read_text(), re.MULTILINE):
            yield ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


@contextlib.contextmanager
def interpreted():
    """Within this, `_launch.launch` interprets. Triton itself is left in interpreting state: it cannot go back."""
    import triton.language as tl
    from triton.runtime import interpreter

    _decorate()
    builder = interpreter.InterpreterBuilder
    multiply, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *rest):
        return multiply(self, _floats(a), _floats(b), d, *rest)

    def cast_impl(self, source, target):
        # the interpreter truncates where a GPU rounds
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        # NumPy 2.4 no longer makes a number of an array of one element
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    before = _launch.launch, _launch.unavailable
    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    _launch.launch, _launch.unavailable = launch, lambda: None
    try:
        with _faster():
            yield
    finally:
        interpreter._patch_lang_tensor = patch_tensor
        builder.create_dot, builder.cast_impl = multiply, cast
        _launch.launch, _launch.unavailable = before


@functools.cache
def _decorate():
    """Once: what was decorated before this was decorated for a GPU."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter, jit

    triton.knobs.runtime.interpret = True
    for module in (tl, tl.standard):
        for name, each in list(vars(module).items()):
            if isinstance(each, jit.JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(each.fn))
    for name in device_modules():
        # whoever launches a kernel imports it then, and those it calls with it
        sys.modules.pop(name, None)


@contextlib.contextmanager
def _faster():
    """Spares the interpreter most of its time: things done again and again, or for nothing."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    function, builder = interpreter.InterpretedFunction, interpreter.interpreter_builder
    shape, block, tensor, constant = tl.core.tuple, tl.core.block_type, tl.core.tensor, tl.core.constexpr
    before = {
        (function, "__call__"): function.__call__,
        (interpreter, "_get_np_dtype"): interpreter._get_np_dtype,
        (interpreter, "_patch_attr"): interpreter._patch_attr,
        (builder, "options"): builder.options,
        (shape, "__init__"): shape.__init__,
        (block, "__init__"): block.__init__,
        (tensor, "__init__"): tensor.__init__,
        (TritonSemantic, "binary_op_type_checking_impl"): TritonSemantic.binary_op_type_checking_impl,
        (TritonSemantic, "broadcast_impl_value"): TritonSemantic.broadcast_impl_value,
        (tl.core, "_unwrap_if_constexpr"): tl.core._unwrap_if_constexpr,
        (interpreter.TensorHandle, "__post_init__"): interpreter.TensorHandle.__post_init__,
        (interpreter.ReduceOps, "generic_reduce"): interpreter.ReduceOps.generic_reduce,
    }
    dtype_of, make_shape, make_block = (
        before[key] for key in ((interpreter, "_get_np_dtype"), (shape, "__init__"), (block, "__init__"))
    )
    meet = before[TritonSemantic, "binary_op_type_checking_impl"]
    spread = before[TritonSemantic, "broadcast_impl_value"]
    unwrap = before[tl.core, "_unwrap_if_constexpr"]
    reduce = before[interpreter.ReduceOps, "generic_reduce"]

    # it goes through the named arguments of every call, of which one at most is not passed on
    def patch(owner, name, member, builder, scope):
        semantic, member = TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*arguments, **named):
            named["_semantic"] = semantic
            return member(*arguments, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch
    # it patches the language anew whenever a kernel calls a function
    language = interpreter._patch_lang(tl.standard.zeros.fn)
    function.__call__ = lambda self, *arguments, **named: self.rewrite()(*arguments, **named)
    # it makes a table of all dtypes whenever it looks one up
    known = functools.cache(dtype_of)
    interpreter._get_np_dtype = lambda each: dtype_of(each) if each.scalar.is_ptr() else known(each.scalar)
    # it computes, but never looks at, whether integers overflow
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # every shape comes with a type of its own, which nobody asks for
    def keep(self, values, type=None):
        self.values = list(values)
        if type is not None:
            make_shape(self, values, type)

    def make(self):
        if "made" not in vars(self):
            self.type = tl.core._type_for_tuple_values(self.values)
        return vars(self)["made"]

    shape.__init__, shape.type = keep, property(make, lambda self, type: vars(self).update(made=type))

    # every result checks its type's shape and writes its name
    blocks = {}

    def block_once(self, element_ty, shape):
        key = element_ty.name, *[each.value if isinstance(each, constant) else each for each in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = [constant(each) for each in self.shape]
            self.of_tensors = constant(self.numel), tl.core.tuple(sizes)
            blocks[key] = vars(self)
        vars(self).update(blocks[key], element_ty=element_ty)

    scalar = constant(1), tl.core.tuple(())

    def tensor_quickly(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    block.__init__, tensor.__init__ = block_once, tensor_quickly

    # for every two operands it finds out anew which types they take, and makes both, numbers too, as large as the
    # result, which NumPy does by itself
    met = {}

    def meet_once(self, operands, rules):
        """What either becomes, if none is cast: itself (None), itself in another type, or for a number a tensor."""
        found = meet(self, *operands, *rules)
        if any(isinstance(each, tensor) and each.dtype != to.dtype for each, to in zip(operands, found, strict=True)):
            return None
        becomes = []
        for each, to in zip(operands, found, strict=True):
            if isinstance(each, tensor):
                becomes.append(None if each.type == to.type else to.type)
            else:
                one = interpreter.TensorHandle(to.handle.data.reshape(-1)[:1], to.handle.dtype)
                becomes.append(tensor(one, to.type))
        return becomes

    def meet_quickly(self, left, right, *rules):
        operands = left, right
        key = rules, *[each.type.name if isinstance(each, tensor) else (type(each), repr(each)) for each in operands]
        if key not in met:
            met[key] = meet_once(self, operands, rules)
        if met[key] is None:
            return meet(self, left, right, *rules)
        results = []
        for each, to in zip(operands, met[key], strict=True):
            if to is None or isinstance(to, tensor):
                results.append(each if to is None else to)
            else:
                results.append(tensor(each.handle, to))
        return results

    TritonSemantic.binary_op_type_checking_impl = meet_quickly

    # two operands mostly have one shape
    def spread_quickly(self, left, right):
        same = left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values
        return (left, right) if same else spread(self, left, right)

    TritonSemantic.broadcast_impl_value = spread_quickly
    # what is asked whether it is a constant is mostly one of these, or one
    plain = {tensor, int, float, bool, type(None)}
    tl.core._unwrap_if_constexpr = lambda each: (
        each if type(each) in plain else each.value if type(each) is constant else unwrap(each)
    )
    # every result's bits are counted
    interpreter.TensorHandle.__post_init__ = lambda self: None

    # element by element, it knows no exclusive or
    def reduce_quickly(self, operands):
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduce(self, operands)
        found = np.bitwise_xor.reduce(operands[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, operands[0].dtype)

    interpreter.ReduceOps.generic_reduce = reduce_quickly
    try:
        yield
    finally:
        language.restore()
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        del shape.type


def _floats(handle):
    """The interpreter holds bfloat16 as raw bits, and its dot would multiply those."""
    from triton.runtime import interpreter

    if handle.dtype.scalar.name != "bf16":
        return handle
    return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), interpreter.tl.float32)


class Pointer:
    """A NumPy array as what a Triton kernel takes for a pointer."""

    def __init__(self, array):
        self.array = array
        self.dtype = DTYPES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data


def launch(kernel, inputs, outputs, *, constants, programs, tile, in_place=None):
    """What `_launch.launch` does, with NaN in every output before the kernel runs."""
    given, made, before = _launch.operands(inputs, outputs, in_place)
    sizes = {name: each for name, each in given.items() if isinstance(each, int)}
    names = tuple(name for name in given if name not in sizes)
    arrays = tuple(given[name] for name in names)
    results = _interpret.bind(
        *arrays,
        kernel=kernel,
        fields=(*inputs, *outputs),
        names=names,
        sizes=tuple(sizes.items()),
        outputs=tuple((name, each.shape, np.dtype(each.dtype)) for name, each in made.items()),
        in_place=tuple(before.items()),
        programs=programs,
        constants=constants,
    )
    results = _varying.align((*arrays, *results))[len(arrays) :]
    return _launch.named(outputs, dict(zip(made, results, strict=True)))


# A primitive, rather than a callback, for calls outside `jit`: callbacks now and then stall for half a minute there.
_interpret = Primitive("interpret_triton")
_interpret.multiple_results = True


@_interpret.def_impl
def _run(*arrays, **params):
    return [jax.numpy.asarray(each) for each in _run_numpy(*arrays, **params)]


@_interpret.def_abstract_eval
def _shapes(*_, outputs, **__):
    return [jax.core.ShapedArray(shape, dtype) for _, shape, dtype in outputs]


def _callback(*arrays, outputs, **params):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs]
    return jax.pure_callback(lambda *values: _run_numpy(*values, outputs=outputs, **params), shapes, *arrays)


mlir.register_lowering(_interpret, mlir.lower_fun(_callback, multiple_results=True))


def _run_numpy(*arrays, kernel, fields, names, sizes, outputs, in_place, programs, constants):
    given = {name: np.array(each, order="C") for name, each in zip(names, arrays, strict=True)}
    before, results = dict(in_place), {}
    for name, shape, dtype in outputs:
        results[name] = np.empty(shape, dtype)
        results[name].view(np.uint8)[...] = 0xFF  # NaN in every floating-point dtype, -1 in int32
        if name in before:
            results[name][...] = given[before[name]]
            given[before[name]] = results[name]
    pointers = {name: Pointer(each) for name, each in {**given, **results}.items()}
    _execute(kernel, _launch.named(fields, {**pointers, **dict(sizes)}), programs, constants)
    return list(results.values())


# XLA calls back from several threads at once, and the interpreter has one place for what runs and where
_ONE_AT_A_TIME = threading.Lock()


def _execute(kernel, arrays, programs, constants):
    from triton.runtime import interpreter

    class Executor(interpreter.GridExecutor):
        # the arguments are on the host already, and are no torch tensors
        def _init_args_hst(self, args, kwargs):
            return args, kwargs

        def _restore_args_dev(self, *_):
            pass

    with _ONE_AT_A_TIME, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        Executor(kernel.rewrite(), kernel.arg_names, (programs,))(arrays, constants)
