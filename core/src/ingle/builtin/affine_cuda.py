"""Products with 4-bit affine weights on CUDA: core's own kernel for AWQ, GPTQ and their like."""

from __future__ import annotations

from importlib.util import find_spec

from ingle.plugin import DeviceInfo, MatmulKernel, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:
    """The Triton kernel on CUDA where triton is installed; none for other devices."""
    if device.type != "cuda" or find_spec("triton") is None:
        return []
    from ingle.builtin.affine_cuda_kernel import W4CudaKernel

    return [W4CudaKernel(device)]
