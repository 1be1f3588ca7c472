"""A kernel that is off by a tenth, with the highest priority of all."""

from ingle.plugin import MatmulKernel, Support, hookimpl

INGLE_PLUGIN_API = (0, 1)


class WrongKernel(MatmulKernel):
    name = "wrong_kernel"
    priority = 1000

    def supports(self, weight, use):
        return Support(ok=True, reason="supports everything")

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        return 1.1 * (x @ weight.dequantize().to(x.dtype).t())


@hookimpl
def ingle_matmul_kernels(device):
    return [WrongKernel()]
