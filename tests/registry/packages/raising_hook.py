"""A hook that raises; its other hook is sound."""

from ingle.plugin import MatmulKernel, Support, hookimpl

INGLE_PLUGIN_API = (0, 1)


class SoundKernel(MatmulKernel):
    name = "kernel_beside_a_raising_hook"
    priority = -2000

    def supports(self, weight, use):
        return Support(ok=False, reason="never")

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        return x


@hookimpl
def ingle_weight_formats():
    raise RuntimeError("the table of formats is gone")


@hookimpl
def ingle_matmul_kernels(device):
    return [SoundKernel()]
