"""The entry point. Cheap to import: torch is loaded only once a checkpoint is opened."""

from __future__ import annotations

from ingle.plugin import WeightFormat, hookimpl

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_weight_formats() -> list[WeightFormat]:
    """The GPTQ weight format."""
    from ingle_quant_gptq.format import GptqFormat

    return [GptqFormat()]
