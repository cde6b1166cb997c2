"""Shards one sequence's tokens over a mesh, and compares output and gradients with those of one device.

Gated linear attention exchanges one state a device, softmax attention sends keys and values around the ring. On a CPU
the devices are virtual: `--devices 4` makes four of them. A device then holds a quarter of the tokens; results agree
to float32's rounding.

    python examples/shard_time.py --devices 4
"""

import argparse
from functools import partial

import jax
import numpy as np

import ejkernel
from ejkernel import parallel

HEADS, DIM = 2, 16


def linear(op, query, key, value, gate):
    return op(query, key, value, g=jax.nn.log_sigmoid(gate))[0]


def softmax(op, query, key, value, gate):
    return op(query, key, value + jax.nn.sigmoid(gate), causal=True)


def with_gradients(run):
    def total(arrays):
        output = run(*arrays)
        return (output**2).sum(), output

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def error(actual, expected):
    return float(np.abs(np.asarray(actual) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    jax.config.update(
        "jax_num_cpu_devices", arguments.devices
    )  # before JAX looks for devices; others are what they are

    mesh = jax.make_mesh((arguments.devices,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = list(jax.random.normal(jax.random.key(0), (4, 1, arguments.tokens, HEADS, DIM)))
    sharded = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P(None, "time")))
    held = sharded[0].addressable_shards[0].data.shape[1]
    print(f"{arguments.devices} devices, {held} of {arguments.tokens} tokens on each")

    over = {"axis_name": "time", "mesh": mesh}
    for name, layer, op, parallel_op in (
        ("gated linear attention", linear, ejkernel.recurrent_gla, parallel.recurrent_gla),
        ("softmax attention", softmax, ejkernel.flash_attention, parallel.flash_attention),
    ):
        (_, expected), expected_gradients = with_gradients(partial(layer, op))(arrays)
        run = with_gradients(partial(layer, partial(parallel_op, **over))).lower(sharded).compile()
        (_, output), gradients = run(sharded)
        worst = max(map(error, gradients, expected_gradients))
        print(f"{name}: output {error(output, expected):.1e}, gradients {worst:.1e} from one device's")
        print(f"  output lies on {len(output.sharding.device_set)} devices, {output.sharding.spec}")


if __name__ == "__main__":
    main()
