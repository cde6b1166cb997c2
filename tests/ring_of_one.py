"""A ring of two devices that are one, which takes their turns: an axis of `vmap` has the collectives of a mesh's."""

import jax
from triton_attention_cases import with_gradients

from ejkernel import parallel
from ejkernel._dispatch import Implementation


def one_by_one(blocks):
    """A ring's implementations: these kernels alone, which may not know what to do with an axis of `vmap`."""

    def run(call, name, *arrays):
        return jax.custom_batching.sequential_vmap(lambda *arrays: getattr(blocks, name)(call, *arrays))(*arrays)

    return (Implementation("kernels", None, lambda _: None, run),)


def on_a_ring(arrays, cotangent, layout="contiguous", **options):
    """The output and the gradients by name of `parallel.flash_attention` on two devices."""

    def device(mine, cotangent):
        return with_gradients(
            lambda **arrays: parallel.flash_attention(**arrays, **options, axis_name="time", layout=layout),
            mine,
            cotangent,
        )

    def sliced(x):
        x = parallel.to_balanced(x, 2) if layout == "balanced" else x
        return x.reshape(x.shape[0], 2, -1, *x.shape[2:])

    def joined(x):
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return parallel.from_balanced(x, 2) if layout == "balanced" else x

    axes = {name: None if name == "softmax_aux" else 1 for name in arrays}
    mine = {name: each if axes[name] is None else sliced(each) for name, each in arrays.items()}
    output, gradients = jax.vmap(device, (axes, 1), 1, axis_name="time")(mine, sliced(cotangent))
    summed = {name: each.sum(1) if axes[name] is None else joined(each) for name, each in gradients.items()}
    return joined(output), summed
