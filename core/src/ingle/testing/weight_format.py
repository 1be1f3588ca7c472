"""The conformance tests of a weight format.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from ingle.errors import CheckpointError
from ingle.plugin import LinearSpec, LinearWeight, Shard, WeightFormat, WeightLoader
from ingle.testing.checkpoint import MemoryCheckpoint, stored_bytes
from ingle.testing.foreign import FOREIGN_CHECKPOINTS
from ingle.testing.plugin_module import PluginConformance
from ingle.testing.tolerance import relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSample:
    """One checkpoint and what its linears are.

    Attributes:
        checkpoint: Headers and tensors.
        expected: Linear name -> [N, K], float: the weight as someone else decoded it (the tool
            that wrote the file, or a decoder that shares no code with the plugin).
        fuse: Names that must fuse into one weight, in this order; empty when they need not.
        label: What the sample is, for test output.
    """

    checkpoint: MemoryCheckpoint
    expected: Mapping[str, torch.Tensor]
    fuse: tuple[str, ...] = ()
    label: str = "sample"


class WeightFormatConformance(PluginConformance):
    """Inherit, set the attributes, write ``samples``; the tests are inherited.

    Attributes:
        format_name: Name of the format under test, among those the plugin gives.
        reads: Kinds of ``ingle.testing.foreign`` this format reads, so that they are not foreign.
        golden_error: Relative Frobenius error ``dequantize`` may have against ``expected``.
        ranks: Numbers of ranks over which a linear is cut.
    """

    format_name: ClassVar[str]
    reads: ClassVar[frozenset[str]]
    golden_error: ClassVar[float] = 1e-6
    ranks: ClassVar[tuple[int, ...]] = (2, 4)
    dtype: ClassVar[torch.dtype] = torch.float32

    def samples(self) -> Sequence[WeightSample]:
        """The samples: golden files, or what the plugin's own packer makes of a known weight."""
        raise AttributeError(f"{type(self).__name__} must define samples()")

    def weight_format(self) -> WeightFormat:
        """The format under test, as the plugin's hook gives it."""
        offered = self.offered("ingle_weight_formats", WeightFormat)
        found: WeightFormat = next(item for item in offered if item.name == self.format_name)
        return found

    def opened(self) -> list[tuple[WeightSample, WeightLoader]]:
        """Every sample with a loader for it."""
        format_ = self.weight_format()
        return [(sample, format_.open(sample.checkpoint.info)) for sample in self.samples()]

    def spec(self, name: str, matrix: torch.Tensor, shard: Shard | None = None) -> LinearSpec:
        """The linear of ``matrix``'s shape, whole or in part."""
        return LinearSpec(
            name=name,
            in_features=matrix.shape[1],
            out_features=matrix.shape[0],
            dtype=self.dtype,
            device=self.device,
            shard=shard or Shard(),
        )

    def test_it_detects_its_own_samples_with_a_reason(self) -> None:
        for sample in self.samples():
            detection = self.weight_format().detect(sample.checkpoint.info)
            assert detection is not None, f"{sample.label}: declined"
            assert detection.reason, f"{sample.label}: no reason"

    def test_it_declines_everyone_elses_checkpoints(self) -> None:
        for kind, info in FOREIGN_CHECKPOINTS.items():
            if kind not in self.reads:
                assert self.weight_format().detect(info) is None, f"it claims {kind}"

    def test_detecting_and_opening_read_no_tensor(self) -> None:
        for sample, _ in self.opened():
            self.weight_format().detect(sample.checkpoint.info)
            assert sample.checkpoint.reader.read == []

    def test_linears_are_listed_with_their_shapes_from_headers(self) -> None:
        for sample, loader in self.opened():
            listed = loader.linears()
            for name, matrix in sample.expected.items():
                n, k = listed[name]
                assert k == matrix.shape[1], f"{sample.label} {name}: K"
                assert n >= matrix.shape[0], f"{sample.label} {name}: N"

    def test_tensor_names_and_bytes_are_those_of_the_file(self) -> None:
        for sample, loader in self.opened():
            info = sample.checkpoint.info
            for name in sample.expected:
                tensors = loader.tensor_names(name)
                assert set(tensors) <= set(info.tensor_names)
                assert tensors
                total = sum(stored_bytes(info, tensor) for tensor in tensors)
                assert loader.packed_bytes(name) == total

    def test_dequantize_gives_the_golden_weight(self) -> None:
        for sample, loader in self.opened():
            for name, matrix in sample.expected.items():
                weight = loader.load_linear(self.spec(name, matrix), sample.checkpoint.reader)
                n, k = matrix.shape
                assert (weight.out_features, weight.in_features) == (n, k)
                dense = weight.dequantize()
                assert dense.shape == (weight.stored_out_features, k)
                error = relative_error(dense[:n], matrix)
                assert error <= self.golden_error, f"{sample.label} {name}: off by {error:.2g}"

    def test_loading_leaves_the_checkpoint_untouched(self) -> None:
        for sample, loader in self.opened():
            reader = sample.checkpoint.reader
            before = {name: reader.get(name).clone() for name in reader.names()}
            for name, matrix in sample.expected.items():
                loader.load_linear(self.spec(name, matrix), reader).dequantize()
            for name, tensor in before.items():
                assert torch.equal(reader.get(name), tensor), name

    def test_a_linear_of_another_shape_is_refused_by_name(self) -> None:
        for sample, loader in self.opened():
            for name, matrix in sample.expected.items():
                wrong = matrix.new_empty(8 * matrix.shape[0], 2 * matrix.shape[1])
                with pytest.raises(CheckpointError) as caught:
                    loader.load_linear(self.spec(name, wrong), sample.checkpoint.reader)
                assert name in str(caught.value)

    def test_a_weight_made_of_its_own_tensors_is_the_same_weight(self) -> None:
        for weight in self.loaded():
            copies = {name: tensor.clone() for name, tensor in weight.tensors().items()}
            copy = weight.with_tensors(copies)
            assert torch.equal(copy.dequantize(), weight.dequantize())
            assert copy.nbytes == weight.nbytes > 0

    def test_input_order_is_a_permutation(self) -> None:
        for weight in self.loaded():
            if weight.input_order is not None:
                assert weight.input_order.dtype is torch.int64
                found = weight.input_order.sort().values
                assert torch.equal(found, torch.arange(weight.in_features))

    def test_shards_join_to_the_whole(self) -> None:
        for sample, loader in self.opened():
            for name, matrix in sample.expected.items():
                for axis in ("out", "in"):
                    for ranks in self.ranks:
                        self._check_shards((sample, loader, name, matrix), axis, ranks)

    def _check_shards(self, case: Any, axis: Any, ranks: int) -> None:
        sample, loader, name, matrix = case
        dim = 0 if axis == "out" else 1
        specs = [self.spec(name, matrix, s) for s in cut(axis, matrix.shape[dim], ranks)]
        supports = [loader.can_shard(spec) for spec in specs]
        if not specs or not all(supports):
            assert all(s.reason for s in supports if not s.ok), "declines without a reason"
            return
        parts = [loader.load_linear(spec, sample.checkpoint.reader) for spec in specs]
        joined = torch.cat([part.dequantize() for part in parts], dim=dim)
        whole = loader.load_linear(self.spec(name, matrix), sample.checkpoint.reader).dequantize()
        assert torch.equal(joined, whole), f"{sample.label} {name}: {ranks} ranks along {axis}"

    def test_fused_equals_parts(self) -> None:
        for sample, loader in self.opened():
            names = sample.fuse or tuple(sample.expected)[:2]
            specs = [self.spec(name, sample.expected[name]) for name in names]
            load = [loader.load_linear(spec, sample.checkpoint.reader) for spec in specs]
            apart = torch.cat([part.dequantize() for part in load])
            fused = loader.fuse(load) if len(load) > 1 else None
            assert fused is not None or not sample.fuse, f"{sample.label}: did not fuse"
            if fused is not None:
                assert torch.equal(fused.dequantize(), apart), f"{sample.label}: fused differs"
                assert fused.out_features == sum(len(sample.expected[name]) for name in names)

    def test_a_bound_is_declared_for_every_dtype(self) -> None:
        declared = self.weight_format().max_relative_error
        for name in ("float32", "float16", "bfloat16"):
            assert 0 <= declared[name] <= 0.1, f"{name}: {declared.get(name)}"

    def loaded(self) -> list[LinearWeight]:
        """Every linear of every sample."""
        return [
            loader.load_linear(self.spec(name, matrix), sample.checkpoint.reader)
            for sample, loader in self.opened()
            for name, matrix in sample.expected.items()
        ]


def cut(axis: Any, size: int, ranks: int) -> list[Shard]:
    """Equal shards of ``size`` features, or none when they do not come out even."""
    if size % ranks:
        return []
    step = size // ranks
    return [
        Shard(axis=axis, start=rank * step, stop=(rank + 1) * step, size=size)
        for rank in range(ranks)
    ]
