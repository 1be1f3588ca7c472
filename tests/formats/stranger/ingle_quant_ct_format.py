"""compressed-tensors ``pack-quantized`` as a stranger would add it: integer codes, so the shared
affine loader does everything but find them. Codes and zeros are stored with 2**(b-1) added.

Shape letters: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from ingle.plugin import AffineWeight, CheckpointInfo, TensorReader
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import (
    AffineFormat,
    AffineLoader,
    StoredLinear,
    infer_group_size,
    integer_zeros,
    module_tensors,
    owned,
    packed_modules,
)
from ingle.plugin.affine_packing import repack_words, unpack_bits

ROLES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


class CompressedTensorsLoader(AffineLoader):
    """Reads them."""

    def read_weight(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """One linear, whole."""
        scales = reader.get(linear.tensors["weight_scale"]).T
        inputs, groups = linear.in_features, scales.shape[0]
        return AffineWeight(
            bits=linear.bits,
            group_size=infer_group_size(inputs, groups, None),
            in_features=inputs,
            out_features=linear.out_features,
            codes=repack_words(
                reader.get(linear.tensors["weight_packed"]), linear.bits, inputs, axis=1
            ),
            scales=owned(scales),
            zeros=self._zeros(linear, reader),
        )

    def _zeros(self, linear: StoredLinear, reader: TensorReader) -> torch.Tensor | None:
        if "weight_zero_point" not in linear.tensors:
            return None
        words = reader.get(linear.tensors["weight_zero_point"])
        zeros = unpack_bits(words, linear.bits, linear.out_features, axis=0)
        return integer_zeros(zeros, linear.bits)


class CompressedTensorsFormat(AffineFormat):
    """``weight_packed`` int32 [N, K*b/32], ``weight_scale`` [N, G], zeros packed along N."""

    name: ClassVar[str] = "compressed-tensors"
    own_methods: ClassVar[re.Pattern[str]] = re.compile("^compressed-tensors$")
    possible_methods: ClassVar[re.Pattern[str]] = own_methods
    loader_class: ClassVar[type[AffineLoader]] = CompressedTensorsLoader
    wanted_shapes: ClassVar[str] = "weight_packed [N, K * bits / 32], weight_scale [N, groups]"

    def find_linears(
        self, info: CheckpointInfo, config: AffineConfig
    ) -> Mapping[str, StoredLinear]:
        """Every module with packed codes and scales."""
        groups = config.values.get("config_groups") or {}
        bits = next((g["weights"]["num_bits"] for g in groups.values()), 4)
        found = {}
        for name in packed_modules(info, ".weight_packed"):
            rows, words = info.tensor_shapes[f"{name}.weight_packed"]
            found[name] = StoredLinear(
                name=name,
                layout="pack-quantized",
                bits=bits,
                out_features=rows,
                in_features=words * 32 // bits,
                spare_inputs=32 // bits - 1,
                tensors=module_tensors(info, name, ROLES),
            )
        return found
