"""``ingle dequantize``: a packed checkpoint written out dense."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def dequantize(
    checkpoint: str,
    out: Path,
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float16",
    quantization: str = "auto",
    revision: str | None = None,
    disable_plugin: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> None:
    """Write a packed checkpoint as a dense one: each packed linear becomes a plain weight.

    Everything else is copied: other tensors as they are, tokenizer and templates too. For merging,
    inspecting and quantising again.

    Args:
        checkpoint: A folder with safetensors files, whole model or single linear, or a hub id.
        out: The folder to write; it must be new or empty.
        dtype: Of the weights that were packed.
        quantization: Weight format, or `auto` to detect it.
        revision: Branch, tag or commit of a hub id.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
    """
    import torch

    from ingle.checkpoint.hub import resolve_model
    from ingle.engine.dequantize import dequantize_checkpoint
    from ingle.registry.loader import load_plugins

    path = resolve_model(checkpoint, revision)
    registry = load_plugins(disable_plugin)
    copy = dequantize_checkpoint(path, out, getattr(torch, dtype), registry, quantization)
    print(copy.text())
