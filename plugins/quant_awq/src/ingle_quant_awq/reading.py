"""Reads the tensors of AWQ linears into affine weights.

Shape letters: N output features, K input features, G groups, Z words of zeros per row.
"""

from __future__ import annotations

import torch

from ingle.plugin import AffineWeight, CheckpointError, CheckpointInfo, TensorReader
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_fragments import read_fragments
from ingle.plugin.affine_loader import (
    StoredLinear,
    expect_shape,
    infer_group_size,
    integer_zeros,
    no_zeros,
    owned,
)
from ingle.plugin.affine_packing import pack_bits, repack_words, unpack_bits
from ingle_quant_awq.layouts import INPUT_DIVISOR
from ingle_quant_awq.packing import transpose_gemm, unpack_columns, unpack_gemv_fast


class AwqReader:
    """Reads the linears of one AWQ checkpoint, whose headers are ``info``."""

    def __init__(self, info: CheckpointInfo, config: AffineConfig) -> None:
        self.info = info
        self.config = config

    def read(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole, with the divisor of the activation before it as input scale."""
        read = {
            "gemm": self._read_gemm,
            "gemv": self._read_gemv,
            "gemv_fast": self._read_gemv_fast,
            "marlin": self._read_marlin,
        }[linear.layout]
        weight = read(linear, reader)
        if INPUT_DIVISOR in linear.tensors:
            divisor = reader.get(linear.tensors[INPUT_DIVISOR])
            weight.input_scale = divisor.to(torch.float32).reciprocal()
        return weight

    def _shape(self, linear: StoredLinear, role: str) -> tuple[int, ...]:
        return self.info.tensor_shapes[linear.tensors[role]]

    def _read_gemm(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        scales = reader.get(linear.tensors["scales"])
        return AffineWeight(
            bits=linear.bits,
            group_size=self._group_size(linear, scales.shape[0]),
            in_features=linear.in_features,
            out_features=linear.out_features,
            codes=self._gemm_codes(linear, reader.get(linear.tensors["qweight"])),
            scales=owned(scales),
            zeros=self._gemm_zeros(linear, scales.shape[0], reader),
        )

    def _gemm_codes(self, linear: StoredLinear, words: torch.Tensor) -> torch.Tensor:
        """Words packed along the outputs to int32 [N, W] packed along the inputs."""
        if linear.bits == 4 and linear.in_features % 8 == 0 and words.dtype == torch.int32:
            return owned(transpose_gemm(words)[: linear.out_features])
        codes = unpack_columns(words, linear.bits, linear.out_features, self._interleaved(linear))
        return pack_bits(codes.T, linear.bits)

    def _gemm_zeros(
        self, linear: StoredLinear, num_groups: int, reader: TensorReader
    ) -> torch.Tensor | None:
        """uint8 [G, N], or None when none are stored or all are the middle."""
        if "qzeros" not in linear.tensors:
            return no_zeros(self.config, linear)
        name = linear.tensors["qzeros"]
        words = expect_shape(
            name, reader.get(name), (num_groups, self._shape(linear, "qweight")[1])
        )
        zeros = unpack_columns(words, linear.bits, linear.out_features, self._interleaved(linear))
        return integer_zeros(zeros, linear.bits)

    def _interleaved(self, linear: StoredLinear) -> bool:
        """4 bits always; other widths only as AutoRound writes them (5 to 7)."""
        if linear.bits == 4:
            return True
        return linear.bits in (5, 6, 7) and written_by_auto_round(self.config)

    def _group_size(self, linear: StoredLinear, num_groups: int) -> int:
        stated = self.config.module(linear.name).group_size
        return infer_group_size(linear.in_features, num_groups, stated, linear.tensors["scales"])

    def _read_gemv(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """Codes and zeros in natural order along the inputs; columns past G are padding."""
        group_size = self._padded_group_size(linear, self._shape(linear, "scales")[1])
        num_groups = linear.in_features // group_size
        zeros = unpack_bits(reader.get(linear.tensors["qzeros"]), 4, num_groups)
        return AffineWeight(
            bits=4,
            group_size=group_size,
            in_features=linear.in_features,
            out_features=linear.out_features,
            codes=repack_words(
                reader.get(linear.tensors["qweight"]), 4, linear.in_features, axis=1
            ),
            scales=owned(reader.get(linear.tensors["scales"])[:, :num_groups].T),
            zeros=integer_zeros(zeros.T, 4),
        )

    def _read_gemv_fast(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """Zeros are stored as the rounded product -(scale * zero); rows past G are padding."""
        group_size = self._padded_group_size(linear, self._shape(linear, "scales")[0])
        num_groups = linear.in_features // group_size
        zeros = linear.tensors.get("scaled_zeros") or linear.tensors["qzeros"]
        offsets = expect_shape(zeros, reader.get(zeros), self._shape(linear, "scales"))
        return AffineWeight(
            bits=4,
            group_size=group_size,
            in_features=linear.in_features,
            out_features=linear.out_features,
            codes=pack_bits(unpack_gemv_fast(reader.get(linear.tensors["qweight"])), 4),
            scales=owned(reader.get(linear.tensors["scales"])[:num_groups]),
            offsets=owned(offsets[:num_groups]),
        )

    def _padded_group_size(self, linear: StoredLinear, padded: int) -> int:
        """The group size whose groups, padded as the writers pad them, are ``padded`` many.

        Words of 8 zeros, rounded up to 2 words for groups of 64 and 4 for groups of 32.
        """
        stated = self.config.module(linear.name).group_size
        stated = linear.in_features if stated == -1 else stated
        sizes = [stated] if stated is not None and stated > 0 else []
        for size in (*sizes, 128, 64, 32, linear.in_features):
            multiple = 8 * max(1, 128 // size)
            groups = linear.in_features // size
            if linear.in_features % size == 0 and -(-groups // multiple) * multiple == padded:
                return size
        raise CheckpointError(
            f"tensor {linear.tensors['scales']}: {padded} padded groups do not fit "
            f"{linear.in_features} inputs at group size {stated}, 128, 64 or 32"
        )

    def _read_marlin(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        words = reader.get(linear.tensors["qweight"])
        return read_fragments(words, reader.get(linear.tensors["scales"]), linear.out_features)


def written_by_auto_round(config: AffineConfig) -> bool:
    """Whether AutoRound wrote the file, be it under its own name or exported as plain AWQ."""
    named = (config.method or "", config.text("provider") or "")
    return "autoround_version" in config.values or any("round" in name for name in named)
