"""The conformance kit itself: every fault it is there to catch is caught."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from ingle.builtin.dense import DenseFormat, DenseLoader
from ingle.builtin.dense_linear import DenseTorchKernel, DenseWeight, PackedDenseWeight
from ingle.builtin.kv_native import NativeKVCache, NativeStore
from ingle.plugin import Detection
from ingle.testing import (
    KVCacheFormatConformance,
    MatmulKernelConformance,
    PluginConformance,
    WeightFormatConformance,
    WeightSample,
    memory_checkpoint,
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class FirstWins(NativeKVCache):
    def write(self, store, x, slot_mapping) -> None:
        super().write(store, x.flip(0), slot_mapping.flip(0))


class WritesNeighbours(NativeKVCache):
    def write(self, store, x, slot_mapping) -> None:
        super().write(store, x, slot_mapping)
        store.tokens[(slot_mapping + 1) % store.tokens.shape[0]] *= 0.5


class ForgetsScales(NativeKVCache):
    def bytes_per_block(self, geometry) -> int:
        return super().bytes_per_block(geometry) - 2


class CopiesViews(NativeKVCache):
    def view(self, store, first_block, num_tokens):
        return super().view(store, first_block, num_tokens).clone()


class SpoilsInput(NativeKVCache):
    def write(self, store, x, slot_mapping) -> None:
        super().write(store, x, slot_mapping)
        x.zero_()


class KeepsOneStore(NativeKVCache):
    """Remembers the first store it made, as a format that is not stateless would."""

    def __init__(self) -> None:
        self.storage: dict[torch.dtype, torch.Tensor] = {}

    def allocate(self, geometry, num_blocks, device):
        store = NativeStore(geometry, num_blocks, device.torch_device)
        kept = self.storage.setdefault(geometry.dtype, store.heads.flatten())
        store.heads = kept[: store.heads.numel()].view_as(store.heads)
        store.blocks = store.heads.transpose(0, 1)
        store.flat = store.heads.flatten(1, 2)
        store.tokens = store.flat.transpose(0, 1)
        return store


class Imprecise(NativeKVCache):
    def write(self, store, x, slot_mapping) -> None:
        super().write(store, x * 1.01, slot_mapping)


class BlockIsSecond(NativeKVCache):
    def allocate(self, geometry, num_blocks, device):
        store = super().allocate(geometry, num_blocks, device)
        store.blocks = store.heads
        return store


class ClaimsAllCaches(NativeKVCache):
    def detect(self, info):
        return Detection(reason="why not")


CACHE_FAULTS = {
    FirstWins: "test_a_slot_written_twice_keeps_the_last",
    WritesNeighbours: "test_neighbours_keep_their_bits",
    ForgetsScales: "test_a_store_takes_the_bytes_it_declares",
    CopiesViews: "test_a_view_is_what_gather_gives_and_lies_in_the_store",
    SpoilsInput: "test_the_input_may_be_strided_and_is_left_alone",
    KeepsOneStore: "test_both_sides_are_kept_apart",
    Imprecise: "test_what_is_written_comes_back_within_the_bound",
    BlockIsSecond: "test_copying_a_block_of_every_tensor_copies_its_tokens",
    ClaimsAllCaches: "test_it_does_not_claim_checkpoints_that_ask_for_nothing",
}


@pytest.mark.parametrize(("fault", "test"), CACHE_FAULTS.items())
def test_a_faulty_cache_is_caught(fault, test) -> None:
    class Kit(KVCacheFormatConformance):
        plugin_module = "ingle.builtin.kv_native"
        format_name = "auto"
        geometries = ((2, 64, 16), (2, 64, 16))

        def kv_format(self):
            return fault()

    with pytest.raises(AssertionError):
        getattr(Kit(), test)()


class WrongAt17Rows(DenseTorchKernel):
    def matmul(self, x, weight, **options):
        y = super().matmul(x, weight, **options)
        return y * 1.01 if x.shape[0] == 17 else y


class SpoilsActivations(DenseTorchKernel):
    def matmul(self, x, weight, **options):
        y = super().matmul(x, weight, **options)
        x.mul_(2)
        return y


class NeverTheSame(DenseTorchKernel):
    def matmul(self, x, weight, **options):
        return super().matmul(x, weight, **options) + 1e-7 * torch.rand(())


class IgnoresOut(DenseTorchKernel):
    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        return super().matmul(x, weight)


class LeavesWorkspaceDirty(DenseTorchKernel):
    def workspace_bytes(self, weight, max_rows) -> int:
        return 64

    def matmul(self, x, weight, *, out=None, workspace=None, epilogue=None):
        workspace.fill_(1)
        return super().matmul(x, weight, out=out)


class ForgetsEpilogue(DenseTorchKernel):
    epilogues = frozenset({"add"})


class LosesTheWeight(DenseTorchKernel):
    def prepare(self, weight):
        return DenseWeight(torch.zeros_like(weight.dequantize()))


class SupportsNothing(DenseTorchKernel):
    def supports(self, weight, use):
        return super().supports(PackedDenseWeight(weight.weight), use)


KERNEL_FAULTS = {
    WrongAt17Rows: "test_it_equals_dequantize_and_multiply_at_every_row_count",
    SpoilsActivations: "test_a_strided_input_gives_the_same_and_is_left_alone",
    NeverTheSame: "test_the_same_input_gives_the_same_bits",
    IgnoresOut: "test_out_is_where_the_result_goes",
    LeavesWorkspaceDirty: "test_it_equals_dequantize_and_multiply_at_every_row_count",
    ForgetsEpilogue: "test_epilogues_it_lists_are_carried_out",
    LosesTheWeight: "test_a_prepared_weight_still_dequantises",
    SupportsNothing: "test_every_named_kernel_supports_something",
}


@pytest.mark.parametrize(("fault", "test"), KERNEL_FAULTS.items())
def test_a_faulty_kernel_is_caught(fault, test) -> None:
    class Kit(MatmulKernelConformance):
        plugin_module = "ingle.builtin.dense"
        kernel_names = frozenset({"dense_torch"})
        max_relative_error = DenseFormat.max_relative_error
        dtypes = (torch.float32,)

        def kernels(self):
            return [fault()]

        def weights(self, dtype):
            return [DenseWeight(normal(24, 40).to(dtype))]

    with pytest.raises(AssertionError):
        getattr(Kit(), test)()


def faulty_loader(**methods) -> type[DenseFormat]:
    """A dense format whose loader has some methods replaced."""
    loader = type("FaultyLoader", (DenseLoader,), methods)
    return type("FaultyFormat", (DenseFormat,), {"open": lambda self, info: loader(info)})


class ClaimsAllWeights(DenseFormat):
    def detect(self, info):
        return Detection(reason="why not")


def transposed(self, spec, reader):
    return DenseWeight(reader.get(f"{spec.name}.weight").t().contiguous())


def always_first_half(self, spec, reader):
    weight = DenseLoader.load_linear(self, spec, reader).weight
    if spec.shard.axis == "out":
        weight = reader.get_slice(f"{spec.name}.weight", 0, 0, weight.shape[0])
    return DenseWeight(weight)


def in_place(self, spec, reader):
    weight = DenseLoader.load_linear(self, spec, reader).weight
    return DenseWeight(weight.add_(0.5))


def fuses_backwards(self, parts):
    return DenseWeight(torch.cat([part.dequantize() for part in reversed(parts)]))


def checks_nothing(self, spec, reader):
    return DenseWeight(reader.get(f"{spec.name}.weight"))


FORMAT_FAULTS = [
    (ClaimsAllWeights, "test_it_declines_everyone_elses_checkpoints"),
    (faulty_loader(load_linear=transposed), "test_dequantize_gives_the_golden_weight"),
    (faulty_loader(load_linear=always_first_half), "test_shards_join_to_the_whole"),
    (faulty_loader(load_linear=in_place), "test_loading_leaves_the_checkpoint_untouched"),
    (
        faulty_loader(load_linear=checks_nothing),
        "test_a_linear_of_another_shape_is_refused_by_name",
    ),
    (faulty_loader(fuse=fuses_backwards), "test_fused_equals_parts"),
    (faulty_loader(fuse=lambda self, parts: None), "test_fused_equals_parts"),
    (
        faulty_loader(packed_bytes=lambda self, name: 1),
        "test_tensor_names_and_bytes_are_those_of_the_file",
    ),
    (
        faulty_loader(linears=lambda self: {"a": (40, 24), "b": (40, 24)}),
        "test_linears_are_listed_with_their_shapes_from_headers",
    ),
]


@pytest.mark.parametrize(("fault", "test"), FORMAT_FAULTS)
def test_a_faulty_format_is_caught(fault, test) -> None:
    class Kit(WeightFormatConformance):
        plugin_module = "ingle.builtin.dense"
        format_name = "dense"
        reads = frozenset({"dense"})

        def samples(self):
            tensors = {"a.weight": normal(24, 40), "b.weight": normal(24, 40) + 1}
            expected = {name.removesuffix(".weight"): t.clone() for name, t in tensors.items()}
            checkpoint = memory_checkpoint(tensors)
            return [WeightSample(checkpoint=checkpoint, expected=expected, fuse=("a", "b"))]

        def weight_format(self):
            return fault()

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Kit(), test)()


def silencing_kit(reasons: Mapping[str, str]) -> PluginConformance:
    class Kit(PluginConformance):
        plugin_module = "ingle.builtin.dense"
        silenced = reasons
        test_every_hook_is_spelled_marked_and_typed_right = None  # type: ignore[assignment]

    return Kit()


def test_an_inherited_test_may_be_silenced_only_with_a_reason() -> None:
    name = "test_every_hook_is_spelled_marked_and_typed_right"
    check = "test_no_inherited_test_is_silenced_without_a_reason"
    getattr(silencing_kit({name: "the hooks need a card that CI lacks"}), check)()
    for reasons in ({}, {name: "no"}, {name: "a long enough reason", "test_x": "not a test"}):
        with pytest.raises(AssertionError):
            getattr(silencing_kit(reasons), check)()


def test_a_plugin_that_imports_torch_is_caught() -> None:
    class Kit(PluginConformance):
        plugin_module = "ingle.builtin.dense_linear"

    with pytest.raises(AssertionError, match="import heavy packages inside functions"):
        Kit().test_importing_the_plugin_loads_neither_torch_nor_triton()
