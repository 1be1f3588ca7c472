"""Recognises AWQ checkpoints and opens them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ingle.plugin import CheckpointInfo, Quantizer
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import AffineFormat, StoredLinear
from ingle_quant_awq.layouts import find_linears, with_input_divisors
from ingle_quant_awq.loader import AwqLoader
from ingle_quant_awq.making.options import AwqOptions


class AwqFormat(AffineFormat):
    """AWQ as AutoAWQ, llm-awq, GPTQModel and AutoRound write it."""

    name: ClassVar[str] = "awq"
    aliases: ClassVar[tuple[str, ...]] = ("awq_marlin", "auto_round:auto_awq")
    own_methods: ClassVar[re.Pattern[str]] = re.compile("awq")
    possible_methods: ClassVar[re.Pattern[str]] = re.compile("awq|gptq|auto.?round|^marlin$")
    wanted_shapes: ClassVar[str] = (
        "qweight [K, N * bits / 32], scales [groups, N], qzeros [groups, N * bits / 32]"
    )

    quantizer_options: ClassVar[type[Any] | None] = AwqOptions

    def find_linears(
        self, info: CheckpointInfo, config: AffineConfig
    ) -> Mapping[str, StoredLinear]:
        """Every module stored in an AWQ layout."""
        return find_linears(info, config)

    def make_loader(
        self, info: CheckpointInfo, config: AffineConfig, linears: Mapping[str, StoredLinear]
    ) -> AwqLoader:
        """A loader that also divides inputs where an activation left its scales behind."""
        return AwqLoader(info, config, with_input_divisors(info, linears))

    def make_quantizer(self, options: AwqOptions, source: CheckpointInfo) -> Quantizer:
        """AWQ, or round-to-nearest in its layout."""
        from ingle_quant_awq.making.maker import AwqQuantizer

        return AwqQuantizer(options, source)
