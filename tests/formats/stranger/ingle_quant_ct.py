"""The entry point of a stranger's plugin: compressed-tensors."""

from __future__ import annotations

from ingle.plugin import WeightFormat, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_formats() -> list[WeightFormat]:
    """The format."""
    from ingle_quant_ct_format import CompressedTensorsFormat

    return [CompressedTensorsFormat()]
