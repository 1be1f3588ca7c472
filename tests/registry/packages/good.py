"""A sound plugin: one format, one kernel, one cache, each doing the plainest thing."""

from typing import ClassVar

from ingle.plugin import (
    Detection,
    KVCacheFormat,
    KVStore,
    MatmulKernel,
    Support,
    WeightFormat,
    WeightLoader,
    hookimpl,
)

INGLE_PLUGIN_API = (0, 1)


class GoodLoader(WeightLoader):
    def linears(self):
        return {}

    def tensor_names(self, name):
        return (f"{name}.good",)

    def packed_bytes(self, name):
        return 0

    def load_linear(self, spec, reader):
        raise LookupError(spec.name)


class GoodFormat(WeightFormat):
    name = "good"
    aliases = ("good_marlin",)

    def detect(self, info):
        config = info.quantization_config or {}
        return Detection(reason="it says good") if config.get("quant_method") == "good" else None

    def open(self, info):
        return GoodLoader()


class GoodKernel(MatmulKernel):
    name = "good_kernel"
    priority = 50

    def supports(self, weight, use):
        return Support(ok=True, reason="multiplies everything")

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        y = x @ weight.dequantize().to(x.dtype).t()
        return y if out is None else out.copy_(y)


class GoodStore(KVStore):
    def tensors(self):
        return {}


class GoodCache(KVCacheFormat):
    name = "good_cache"
    aliases = ("gc",)
    max_relative_error: ClassVar = {"float32": 0.0}

    def bytes_per_block(self, geometry):
        return 1

    def allocate(self, geometry, num_blocks, device):
        return GoodStore()

    def write(self, store, x, slot_mapping):
        pass

    def gather(self, store, block_table, seq_len):
        return None


@hookimpl
def ingle_weight_formats():
    return [GoodFormat()]


@hookimpl
def ingle_matmul_kernels(device):
    return [GoodKernel()]


@hookimpl
def ingle_kv_cache_formats():
    """Takes fewer arguments than the hook has: that is allowed."""
    return [GoodCache()]
