"""The affine weight: b-bit codes with a scale and a zero for each group of inputs.

AWQ, GPTQ and most integer formats come down to it: ``w[n, k] = (q[n, k] - z[g, n]) * s[g, n]``,
where g is the group that input k belongs to.

Shape letters: N output features as stored, K input features, G groups, b bits, W words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch

from ingle.errors import PluginError
from ingle.plugin.affine_packing import num_words, pack_bits, unpack_bits
from ingle.plugin.linear import LinearWeight, Shard, TritonDecode


@dataclass(kw_only=True, eq=False, repr=False)
class AffineWeight(LinearWeight):
    """b-bit codes, scales and zeros; the one form every kernel for affine weights starts from.

    Attributes:
        bits: b, 2 to 8.
        group_size: Inputs per group, in kernel order (see ``input_order``); the last group may be
            shorter. One group over all inputs is ``group_size == in_features``.
        codes: int32 [N, W]: row n is the bit stream of its K codes along the inputs, in kernel
            order; code k occupies bits [k*b, (k+1)*b), word 0 lowest, and
            ``W = ceil(K * b / 32)``. Bits past the last code mean nothing.
        scales: [G, N], in the dtype the checkpoint stored.
        zeros: uint8 [G, N], or None: every zero is ``2 ** (b - 1)``.
        offsets: Float [G, N] or None. When given, ``w = q * s + offset`` and ``zeros`` is None
            (the AWQ layouts whose zeros are stored as rounded products).
        group_offsets: int64 [G + 1] or None. When given, group g is inputs
            ``group_offsets[g]:group_offsets[g + 1]`` in kernel order, and ``group_size`` is the
            largest group. None means groups of ``group_size``.
        input_order: int64 [K] or None: kernel order. Code k of a row belongs to input
            ``input_order[k]`` (act-order).
        input_scale: [K] in the original input order, or None.
    """

    bits: int
    group_size: int
    in_features: int
    out_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    group_offsets: torch.Tensor | None = None
    input_order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    stored_out_features: int = field(init=False)

    tensor_fields: ClassVar[tuple[str, ...]] = (
        "codes",
        "scales",
        "zeros",
        "offsets",
        "group_offsets",
        "input_order",
        "input_scale",
    )
    """The fields that ``tensors`` gives, where they are not None."""

    def __post_init__(self) -> None:
        groups, stored = self.scales.shape
        self.stored_out_features = stored
        self._require("codes", self._codes_shape())
        for name in ("scales", "zeros", "offsets"):
            self._require(name, (groups, stored))
        self._require("group_offsets", (groups + 1,))
        self._require("input_order", (self.in_features,))
        self._require("input_scale", (self.in_features,))
        if self.zeros is not None and self.offsets is not None:
            raise PluginError("an AffineWeight has zeros or offsets, not both")
        if self.group_offsets is None and -(-self.in_features // self.group_size) != groups:
            raise PluginError(
                f"AffineWeight: {groups} groups of {self.group_size} do not cover "
                f"{self.in_features} inputs; pass group_offsets"
            )

    def _codes_shape(self) -> tuple[int, ...]:
        return (self.stored_out_features, num_words(self.in_features, self.bits))

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise PluginError(
                f"AffineWeight: {name} is {list(tensor.shape)}, expected {list(shape)} "
                f"for {self.bits} bits and {self.in_features} inputs"
            )

    @property
    def num_groups(self) -> int:
        """G."""
        return self.scales.shape[0]

    @property
    def has_equal_groups(self) -> bool:
        """Whether every group has ``group_size`` inputs."""
        return self.num_groups * self.group_size == self.in_features and self.group_offsets is None

    @property
    def triton(self) -> TritonDecode | None:
        """Decodes this layout; None where triton is not installed, or codes lie otherwise."""
        if type(self) is not AffineWeight or find_spec("triton") is None:
            return None
        from ingle.plugin.affine_decode import affine_decode

        return affine_decode(self)

    def group_ids(self) -> torch.Tensor:
        """int64 [K]: the group of each input, in kernel order; never decreasing."""
        device = self.codes.device
        if self.group_offsets is None:
            return torch.arange(self.in_features, device=device) // self.group_size
        counts = self.group_offsets.diff()
        return torch.repeat_interleave(torch.arange(self.num_groups, device=device), counts)

    def unpacked_codes(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Codes of output rows ``start:stop``: uint8 [rows, K], in kernel order."""
        return unpack_bits(self.codes[start:stop], self.bits, self.in_features)

    def integer_zeros(self) -> torch.Tensor:
        """The integer zeros whether stored or implied: uint8 [G, N]. Not for float offsets."""
        if self.offsets is not None:
            raise PluginError("this AffineWeight has float offsets, not integer zeros")
        if self.zeros is not None:
            return self.zeros
        middle = 1 << (self.bits - 1)
        return torch.full_like(self.scales, middle, dtype=torch.uint8)

    def decode_rows(self, start: int, stop: int) -> torch.Tensor:
        """Output rows ``start:stop`` as kernels see them: float32 [rows, K].

        In kernel order and without ``input_scale``: ``x[:, input_order] @ decode_rows(...).T``.
        The zero is subtracted as an integer before the one rounding of the product.
        """
        codes = self.unpacked_codes(start, stop).to(torch.float32)
        columns = slice(start, stop)
        is_equal = self.has_equal_groups
        shape = (codes.shape[0], self.num_groups, self.group_size)
        grouped = codes.view(shape) if is_equal else codes
        scales = self._per_input(self.scales[:, columns])
        if self.offsets is not None:
            grouped.mul_(scales).add_(self._per_input(self.offsets[:, columns]))
        elif self.zeros is None:
            grouped.sub_(float(1 << (self.bits - 1))).mul_(scales)
        else:
            grouped.sub_(self._per_input(self.zeros[:, columns])).mul_(scales)
        return codes

    def _per_input(self, per_group: torch.Tensor) -> torch.Tensor:
        """[G, rows] in float32 as it goes with codes: [rows, G, 1] for equal groups, whose codes
        are [rows, G, K / G], else spread over the inputs, [rows, K]."""
        rows = per_group.T.to(torch.float32)
        return rows.unsqueeze(2) if self.has_equal_groups else rows[:, self.group_ids()]

    def dequantize(self) -> torch.Tensor:
        """The weight as float32 [N, K], in the original input order, ``input_scale`` included."""
        weight = self.decode_rows(0, self.stored_out_features)
        if self.input_order is not None:
            sorted_weight, weight = weight, torch.empty_like(weight)
            weight[:, self.input_order] = sorted_weight
        if self.input_scale is not None:
            weight *= self.input_scale.to(torch.float32)
        return weight

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor it holds, by attribute name."""
        return {n: t for n in self.tensor_fields if (t := getattr(self, n)) is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy that holds ``tensors`` instead of its own."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def shard(self, shard: Shard) -> AffineWeight:
        """The part of this weight that ``shard`` names; the whole when its axis is None."""
        if shard.axis == "out":
            return self._take_outputs(shard.start, shard.stop)
        if shard.axis == "in":
            return self._take_inputs(shard.start, shard.stop)
        return self

    def _take_outputs(self, start: int, stop: int) -> AffineWeight:
        columns = {
            name: tensor[:, start:stop].contiguous()
            for name in ("scales", "zeros", "offsets")
            if (tensor := getattr(self, name)) is not None
        }
        codes = self.codes[start:stop].clone()
        return replace(self, out_features=stop - start, codes=codes, **columns)

    def _take_inputs(self, start: int, stop: int) -> AffineWeight:
        """Inputs ``start:stop`` of the original order; groups keep their scales.

        A cut through a group, or out of act-order, leaves groups of unequal length.
        """
        order = self.input_order
        if order is None:
            order = torch.arange(self.in_features, device=self.codes.device)
        kept = ((order >= start) & (order < stop)).nonzero().squeeze(1)
        groups = Groups.of(self.group_ids()[kept])
        rows = {
            name: tensor[groups.first : groups.stop].contiguous()
            for name in ("scales", "zeros", "offsets")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(
            self,
            in_features=stop - start,
            group_size=groups.size,
            group_offsets=groups.offsets,
            codes=pack_bits(self.unpacked_codes()[:, kept], self.bits),
            input_order=None if self.input_order is None else order[kept] - start,
            input_scale=None if self.input_scale is None else self.input_scale[start:stop],
            **rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How a run of inputs falls into groups.

    Attributes:
        first: Number of the first group used.
        stop: One past the last group used; scales and zeros are cut to ``first:stop``.
        size: Inputs in a group, the largest when they differ.
        offsets: int64 [stop - first + 1], or None when every group but the last is full.
    """

    first: int
    stop: int
    size: int
    offsets: torch.Tensor | None

    @classmethod
    def of(cls, group_ids: torch.Tensor) -> Groups:
        """The groups of inputs whose group numbers ``group_ids`` (int64 [K]) never decrease."""
        first, last = int(group_ids[0]), int(group_ids[-1])
        counts = torch.bincount(group_ids - first, minlength=last - first + 1)
        size = int(counts.max())
        full = bool((counts[:-1] == size).all())
        offsets = None
        if not full:
            offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        return cls(first=first, stop=last + 1, size=size, offsets=offsets)


def concatenate(parts: Sequence[LinearWeight]) -> AffineWeight | None:
    """One weight that computes all ``parts`` side by side along N, or None when they differ.

    They must agree in bits, inputs, groups, kind of zeros, dtype of scales, input order and input
    scale. A part whose zeros are implied joins parts whose integer zeros are stored.
    """
    affine = [part for part in parts if type(part) is AffineWeight]
    if len(affine) != len(parts) or not affine:
        return None
    first = affine[0]
    if not all(_agree(first, part) for part in affine[1:]):
        return None
    zeros = None
    if any(part.zeros is not None for part in affine):
        zeros = torch.cat([part.integer_zeros() for part in affine], dim=1)
    offsets = [part.offsets for part in affine if part.offsets is not None]
    return replace(
        first,
        out_features=sum(part.out_features for part in affine),
        codes=torch.cat([part.codes for part in affine]),
        scales=torch.cat([part.scales for part in affine], dim=1),
        zeros=zeros,
        offsets=torch.cat(offsets, dim=1) if offsets else None,
    )


def _agree(a: AffineWeight, b: AffineWeight) -> bool:
    return (
        (a.bits, a.group_size, a.in_features) == (b.bits, b.group_size, b.in_features)
        and a.num_groups == b.num_groups
        and a.scales.dtype == b.scales.dtype
        and (a.offsets is None) == (b.offsets is None)
        and all(w.out_features == w.stored_out_features for w in (a, b))
        and _same(a.group_offsets, b.group_offsets)
        and _same(a.input_order, b.input_order)
        and _same(a.input_scale, b.input_scale)
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
