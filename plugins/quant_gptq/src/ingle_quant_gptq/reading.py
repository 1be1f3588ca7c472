"""Reads the tensors of GPTQ linears into affine weights.

Shape letters: N output features, K input features, G groups, W words.
"""

from __future__ import annotations

import logging

import torch

from ingle.plugin import AffineWeight, CheckpointInfo, TensorReader
from ingle.plugin.affine import Groups
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_fragments import read_fragments
from ingle.plugin.affine_loader import (
    StoredLinear,
    element_bits,
    expect_shape,
    infer_group_size,
    integer_zeros,
    no_zeros,
    owned,
)
from ingle.plugin.affine_packing import num_words, pack_bits, repack_words, unpack_bits
from ingle_quant_gptq.groups import checked_group_ids, means_sequence
from ingle_quant_gptq.planes import unpack_planes
from ingle_quant_gptq.zeros import ZeroRules, read_zeros, zeros_may_be_lost

logger = logging.getLogger(__name__)


class GptqReader:
    """Reads the linears of one GPTQ checkpoint, whose headers are ``info``."""

    def __init__(self, info: CheckpointInfo, config: AffineConfig) -> None:
        self.info = info
        self.config = config
        self._warned = False

    def read(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole."""
        if linear.layout == "fragments":
            words, scales = (reader.get(linear.tensors[role]) for role in ("B", "s"))
            return read_fragments(words, scales, linear.out_features)
        if linear.layout == "float_zeros":
            return self._read_float_zeros(linear, reader)
        return self._read_plain(linear, reader)

    def _read_plain(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """Codes are put in order of their groups, so that every group is a run of inputs."""
        codes = self._codes(linear, reader)
        scales = reader.get(linear.tensors["scales"])
        stored_zeros = self._zeros(linear, scales.shape[0], reader)
        ids = self._group_ids(linear, scales.shape[0], reader)
        order = torch.argsort(ids, stable=True)
        groups = Groups.of(ids[order])
        in_order = bool((ids.diff() >= 0).all())
        if not in_order:
            unpacked = unpack_bits(codes, linear.bits, linear.in_features)
            codes = pack_bits(unpacked[:, order], linear.bits)
        rows = slice(groups.first, groups.stop)
        return AffineWeight(
            bits=linear.bits,
            group_size=groups.size,
            group_offsets=groups.offsets,
            in_features=linear.in_features,
            out_features=linear.out_features,
            codes=codes,
            scales=owned(scales[rows]),
            zeros=None if stored_zeros is None else owned(stored_zeros[rows]),
            input_order=None if in_order else order,
        )

    def _codes(self, linear: StoredLinear, reader: TensorReader) -> torch.Tensor:
        """int32 [N, W] along the inputs, in the order of the file."""
        name = linear.tensors["qweight"]
        word_bits = element_bits(self.info, name)
        rows = num_words(linear.in_features, linear.bits, word_bits)
        words = expect_shape(name, reader.get(name), (rows, linear.out_features))
        if linear.layout == "planar":
            return pack_bits(unpack_planes(words, linear.bits, axis=0), linear.bits)
        return repack_words(words, linear.bits, linear.in_features, axis=0)

    def _zeros(
        self, linear: StoredLinear, num_groups: int, reader: TensorReader
    ) -> torch.Tensor | None:
        """uint8 [G, N], or None when all are in the middle, stored or not."""
        if "qzeros" not in linear.tensors:
            return no_zeros(self.config, linear)
        name = linear.tensors["qzeros"]
        word_bits = element_bits(self.info, name)
        width = num_words(linear.out_features, linear.bits, word_bits)
        words = expect_shape(name, reader.get(name), (num_groups, width))
        if linear.layout == "planar":
            return integer_zeros(unpack_planes(words, linear.bits, axis=1), linear.bits)
        rules = ZeroRules.of(self.config, linear.name)
        if zeros_may_be_lost(words, linear.bits, linear.out_features, rules):
            self._warn_of_lost_zeros(name)
        return read_zeros(words, linear.bits, linear.out_features, rules)

    def _warn_of_lost_zeros(self, name: str) -> None:
        """Once per checkpoint: it may have hundreds of such layers."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "tensor %s (and maybe others) may have lost zeros when it was written: AutoGPTQ "
                "overwrote neighbours of a zero of 0. Output may be poor; look for a newer export.",
                name,
            )

    def _group_ids(
        self, linear: StoredLinear, num_groups: int, reader: TensorReader
    ) -> torch.Tensor:
        """int64 [K], in the order of the file."""
        g_idx = reader.get(linear.tensors["g_idx"]) if "g_idx" in linear.tensors else None
        if g_idx is not None and not means_sequence(g_idx, num_groups):
            return checked_group_ids(g_idx, num_groups, linear.tensors["g_idx"])
        stated = self.config.module(linear.name).group_size
        size = infer_group_size(linear.in_features, num_groups, stated, linear.tensors["scales"])
        return torch.arange(linear.in_features) // size

    def _read_float_zeros(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """``w = q * s - zeros``: the zeros are stored as products."""
        scales = reader.get(linear.tensors["scales"])
        zeros = expect_shape(
            linear.tensors["zeros"], reader.get(linear.tensors["zeros"]), tuple(scales.shape)
        )
        return AffineWeight(
            bits=linear.bits,
            group_size=infer_group_size(
                linear.in_features, scales.shape[1], None, linear.tensors["scales"]
            ),
            in_features=linear.in_features,
            out_features=linear.out_features,
            codes=self._codes(linear, reader),
            scales=owned(scales.T),
            offsets=owned(-zeros.T),
        )
