"""Products with affine weights on a CPU: core's own kernels for formats of integer codes.

Shape letters: R rows of activations, N output features, K input features.
"""

from __future__ import annotations

from ingle.plugin import DeviceInfo, MatmulKernel, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:
    """The CPU kernels for affine weights, or none for other devices."""
    if device.type != "cpu":
        return []
    from ingle.builtin.affine_cpu_kernels import (
        AffineKernel,
        ByteKernel,
        ByteTileKernel,
        Int4Kernel,
        PlanarKernel,
    )

    return [Int4Kernel(), PlanarKernel(), ByteTileKernel(), ByteKernel(), AffineKernel()]
