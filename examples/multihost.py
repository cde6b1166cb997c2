"""One long sequence over the devices of several processes, compared with the same on one device.

On a cluster, start it once a host with the coordinator's address, or without any argument where `jax.distributed`
finds the cluster by itself; here it starts two processes with four virtual CPU devices each:

    python examples/multihost.py --local 2
    python examples/multihost.py --coordinator host:port --processes 8 --process 3
"""

import argparse
import os
import socket
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel import parallel

TOKENS, HEADS, DIM = 64, 2, 8


def start_locally(processes: int) -> None:
    """Starts this file once for each process and waits for all."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = [sys.executable, __file__, "--coordinator", coordinator, "--processes", str(processes), "--process"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    running = [subprocess.Popen([*command, str(number)], env=environment) for number in range(processes)]
    try:
        codes = [each.wait(timeout=300) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    sys.exit(max(map(abs, codes)))


def loss(recurrent, attention, arrays):
    """A small model: gated linear attention, then softmax attention in a window."""
    query, key, value, gate, borders = arrays
    hidden, _ = recurrent(query, key, value, g=jax.nn.log_sigmoid(gate), cu_seqlens=borders)
    output = attention(query, key, hidden, causal=True, sliding_window=20, cu_seqlens=borders)
    return (output**2).sum(), output


def main() -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    # heads over neighbours where devices divide, time over all of these: so it is time that spans the processes
    groups = HEADS if jax.device_count() % HEADS == 0 else 1
    mesh = jax.make_mesh((jax.device_count() // groups, groups), ("time", "heads"), axis_types=auto)
    random = np.random.default_rng(0)
    tokens = [random.normal(size=(TOKENS, HEADS, DIM)).astype(np.float32) for _ in range(4)]
    borders = np.array([0, 21, 60], np.int32)

    def spread(x, *spec):
        """A global array of which each process makes the parts that its own devices hold."""
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    over = {"axis_name": "time", "mesh": mesh}
    ops = partial(parallel.recurrent, **over), partial(parallel.flash_attention, **over)
    step = jax.jit(jax.value_and_grad(partial(loss, *ops), has_aux=True, allow_int=True))
    (total, output), gradients = step([*(spread(x, "time", "heads") for x in tokens), spread(borders)])

    alone = partial(loss, ejkernel.recurrent, ejkernel.flash_attention)
    step = jax.jit(jax.value_and_grad(alone, has_aux=True, allow_int=True))
    (total_alone, output_alone), gradients_alone = step([*map(jnp.asarray, tokens), jnp.asarray(borders)])

    np.testing.assert_allclose(total, total_alone, rtol=1e-5)
    for actual, expected in zip((output, *gradients[:4]), (output_alone, *gradients_alone[:4]), strict=True):
        for shard in actual.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-4, atol=1e-5)
    print(f"process {jax.process_index()} of {jax.process_count()}: {jax.device_count()} devices agree with one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=int, help="start so many processes on this machine")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which of the processes this is, from 0")
    arguments = parser.parse_args()
    if arguments.local:
        start_locally(arguments.local)
    jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    main()
