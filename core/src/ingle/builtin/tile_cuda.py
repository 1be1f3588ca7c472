"""Products with any weight that decodes in Triton: core's kernel for formats it does not know."""

from __future__ import annotations

from importlib.util import find_spec

from ingle.plugin import DeviceInfo, MatmulKernel, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:
    """The Triton kernel on CUDA where triton is installed; none for other devices."""
    if device.type != "cuda" or find_spec("triton") is None:
        return []
    from ingle.builtin.tile_cuda_kernel import TileCudaKernel

    return [TileCudaKernel()]
