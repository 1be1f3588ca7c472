"""Recognises GPTQ checkpoints and opens them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ingle.plugin import CheckpointInfo, Quantizer
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import AffineFormat, AffineLoader, StoredLinear
from ingle_quant_gptq.layouts import find_linears
from ingle_quant_gptq.loader import GptqLoader
from ingle_quant_gptq.making.options import GptqOptions


class GptqFormat(AffineFormat):
    """GPTQ as GPTQModel, AutoGPTQ, optimum and AutoRound write it, with or without act-order."""

    name: ClassVar[str] = "gptq"
    aliases: ClassVar[tuple[str, ...]] = (
        "gptq_marlin",
        "gptq_v2",
        "auto-round",
        "auto_round",
        "intel/auto-round",
    )
    loader_class: ClassVar[type[AffineLoader]] = GptqLoader
    own_methods: ClassVar[re.Pattern[str]] = re.compile("gptq|auto.?round")
    possible_methods: ClassVar[re.Pattern[str]] = re.compile("awq|gptq|auto.?round|^marlin$")
    wanted_shapes: ClassVar[str] = (
        "qweight [K * bits / 32, N], scales [groups, N], qzeros [groups, N * bits / 32], "
        "g_idx [K] or none"
    )

    quantizer_options: ClassVar[type[Any] | None] = GptqOptions

    def find_linears(
        self, info: CheckpointInfo, config: AffineConfig
    ) -> Mapping[str, StoredLinear]:
        """Every module stored in a GPTQ layout."""
        return find_linears(info, config)

    def make_quantizer(self, options: GptqOptions, source: CheckpointInfo) -> Quantizer:
        """GPTQ, or round-to-nearest in its layout."""
        from ingle_quant_gptq.making.maker import GptqQuantizer

        return GptqQuantizer(options)
