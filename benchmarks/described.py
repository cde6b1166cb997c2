"""Devices that are not here: XLA, Triton and Pallas compile for them, without any, from their description.

What is read off such programs are counts, not times. GPUs need JAX's CUDA plugin (`jax[cuda12]`) and the extra `cuda`,
but no driver; TPUs need `jax[tpu]`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.tpu import prepare
from ejkernel import _devices

# What XLA asks of a GPU that is not there: an H200, by its data sheet and CUDA's tables.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 149000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Platform:
    """Devices that need not be here; `kernel` is what a compiled program calls one of ours."""

    lowering: str
    kernel: str
    counts: tuple[int, ...]
    options: dict[str, Any]

    def devices(self, count: int) -> list[Any]:
        from jax.experimental import topologies

        if self.lowering == "cuda":
            where = {"topology_name": "", "topology": f"1x1x{count}", "target_config": H200}
        else:
            where = {"topology_name": {1: "v5e:2x2", 4: "v5e:2x2", 16: "v5e:4x4"}[count]}
        return list(topologies.get_topology_desc(platform=self.lowering, **where).devices)[:count]

    def kernels(self, text: str) -> int:
        """How many of ours a compiled program calls."""
        return text.count(f'custom_call_target="{self.kernel}"')

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...], kind: Any) -> Any:
        devices = np.array(self.devices(int(np.prod(shape)))).reshape(shape)
        return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(shape))


PLATFORMS = {
    # without a GPU nothing can be tried out
    "gpu": Platform("cuda", "triton_kernel_call", (4, 8), {"xla_gpu_autotune_level": 0}),
    "tpu": Platform("tpu", "tpu_custom_call", (4, 16), {}),
}


@contextlib.contextmanager
def described(platform: Platform) -> Iterator[None]:
    """Kernels are compiled for a described H200, or a v5e."""
    if platform.lowering == "tpu":
        prepare(None)
        yield
        return
    from jax._src.lib import gpu_triton

    # jax-triton would ask a driver which GPU is there
    asked, gpu_triton.get_compute_capability = gpu_triton.get_compute_capability, lambda _: 90
    token = _devices.assumed.set(_devices.named("h200"))
    try:
        yield
    finally:
        _devices.assumed.reset(token)
        gpu_triton.get_compute_capability = asked


def compiled(function: Callable[..., Any], shapes: Any, donated: Any, **options: Any) -> Any:
    """The program for one H200, of arguments of these shapes."""
    gpu = PLATFORMS["gpu"]
    place = jax.sharding.SingleDeviceSharding(gpu.devices(1)[0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with described(gpu):
        traced = jax.jit(function, donate_argnums=donated).trace(*given)
        return traced.lower(lowering_platforms=(gpu.lowering,)).compile({**gpu.options, **options})
