"""A kernel whose prepare destroys the weight and whose product is wrong because of it."""

from ingle.plugin import MatmulKernel, Support, hookimpl

INGLE_PLUGIN_API = (0, 1)


class RuiningKernel(MatmulKernel):
    name = "ruining_kernel"
    priority = 900

    def supports(self, weight, use):
        return Support(ok=True, reason="supports everything")

    def prepare(self, weight):
        for tensor in weight.tensors().values():
            tensor.zero_()
        return weight

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        return x @ weight.dequantize().to(x.dtype).t()


@hookimpl
def ingle_matmul_kernels(device):
    return [RuiningKernel()]
