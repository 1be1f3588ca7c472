"""The entry point: what this package adds to Ingle. Importing it loads neither torch nor triton."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ingle.plugin import hookimpl

if TYPE_CHECKING:
    from ingle.plugin import DeviceInfo, MatmulKernel, WeightFormat

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_formats() -> list[WeightFormat]:
    """EXL2."""
    from ingle_quant_exl2.format import Exl2Format

    return [Exl2Format()]


@hookimpl
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:
    """The CPU kernel on a CPU, the Triton kernel on CUDA where triton is installed."""
    if device.type == "cpu":
        from ingle_quant_exl2.cpu import Exl2CpuKernel

        return [Exl2CpuKernel()]
    if device.type == "cuda" and find_spec("triton") is not None:
        from ingle_quant_exl2.cuda import Exl2CudaKernel

        return [Exl2CudaKernel(device)]
    return []
