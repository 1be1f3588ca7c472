"""One kernel raises when it multiplies, the other when it is asked what it supports."""

from ingle.plugin import MatmulKernel, Support, hookimpl

INGLE_PLUGIN_API = (0, 1)


class RaisingKernel(MatmulKernel):
    name = "raising_kernel"
    priority = 800

    def supports(self, weight, use):
        return Support(ok=True, reason="supports everything")

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        raise ZeroDivisionError("tile of width 0")


class UndecidedKernel(RaisingKernel):
    name = "undecided_kernel"
    priority = 810

    def supports(self, weight, use):
        raise KeyError("capability")


@hookimpl
def ingle_matmul_kernels(device):
    return [RaisingKernel(), UndecidedKernel()]
