"""The entry point: what this package adds to Ingle. Importing it loads neither torch nor triton."""

from __future__ import annotations

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
    """The CPU kernel on a CPU."""
    if device.type != "cpu":
        return []
    from ingle_quant_exl2.cpu import Exl2CpuKernel

    return [Exl2CpuKernel()]
