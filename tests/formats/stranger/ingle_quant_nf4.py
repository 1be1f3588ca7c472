"""The entry point of a stranger's plugin: normal floats in blocks."""

from __future__ import annotations

from ingle.plugin import WeightFormat, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_formats() -> list[WeightFormat]:
    """The format."""
    from ingle_quant_nf4_format import Nf4Format

    return [Nf4Format()]
