"""Claims what the good plugin claims, under its kernel's name."""

from ingle.plugin import Detection, MatmulKernel, Support, WeightFormat, hookimpl

INGLE_PLUGIN_API = (0, 1)


class RivalFormat(WeightFormat):
    name = "rival"
    aliases = ("good_marlin",)

    def detect(self, info):
        config = info.quantization_config or {}
        return Detection(reason="mine too") if config.get("quant_method") == "good" else None

    def open(self, info):
        return None


class RivalKernel(MatmulKernel):
    name = "good_kernel"

    def supports(self, weight, use):
        return Support(ok=False, reason="never")

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        return x


@hookimpl
def ingle_weight_formats():
    return [RivalFormat()]


@hookimpl
def ingle_matmul_kernels(device):
    return [RivalKernel()]
