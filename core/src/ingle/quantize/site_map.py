"""Where each linear of a block gets its input from, by the names of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ingle.checkpoint.model_config import ModelConfig
from ingle.plugin.quantizer import BlockPart, InputSource, LinearSite

_READS_NORM: Final = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
_ROUTERS: Final = ("gate", "shared_expert_gate")


def describe_sites(
    config: ModelConfig, prefix: str, built: Sequence[tuple[str, ...]]
) -> tuple[LinearSite, ...]:
    """The sites of the layer under ``prefix``.

    Args:
        config: The model.
        prefix: ``model.layers.3``.
        built: Names of linears, those that read the same input together, in the model's order.
    """
    names = {name for site in built for name in site}
    return tuple(_describe(config, prefix, site, names) for site in built)


def head_site(name: str, norm_offset: float) -> LinearSite:
    """The output head's site."""
    source = InputSource(norm="model.norm.weight", norm_offset=norm_offset)
    return LinearSite(names=(name,), part="head", source=source)


def _describe(
    config: ModelConfig, prefix: str, site: tuple[str, ...], names: set[str]
) -> LinearSite:
    module, _, leaf = site[0].rpartition(".")
    part: BlockPart = "attention" if module == f"{prefix}.self_attn" else "feed_forward"
    if leaf in _ROUTERS:
        source = _norm(config, prefix, config.norms.mlp_input)
        return LinearSite(names=site, part=part, source=source, quantizable=False)
    if part == "attention":
        joined = leaf == "o_proj"
        found = (
            _values(config, module, names)
            if joined
            else _norm(config, prefix, config.norms.attention_input)
        )
        return LinearSite(names=site, part=part, source=found)
    if leaf in _READS_NORM:
        return LinearSite(
            names=site, part=part, source=_norm(config, prefix, config.norms.mlp_input)
        )
    return LinearSite(names=site, part=part, source=_up(config, module, names))


def _norm(config: ModelConfig, prefix: str, name: str | None) -> InputSource | None:
    if name is None:
        return None
    return InputSource(norm=f"{prefix}.{name}.weight", norm_offset=config.norm_offset)


def _values(config: ModelConfig, module: str, names: set[str]) -> InputSource | None:
    """The value projection, where every query head has its own."""
    if config.num_heads != config.num_kv_heads:
        return None
    size = config.num_heads * config.head_dim
    if f"{module}.v_proj" in names:
        return InputSource(linear=f"{module}.v_proj", rows=(0, size))
    return InputSource(linear=f"{module}.qkv_proj", rows=(2 * size, 3 * size))


def _up(config: ModelConfig, module: str, names: set[str]) -> InputSource | None:
    """The up projection: its outputs are multiplied into the input of the down projection."""
    inner = _inner_size(config, module)
    for leaf in ("up_proj", "w3"):
        if f"{module}.{leaf}" in names:
            return InputSource(linear=f"{module}.{leaf}", rows=(0, inner))
    if f"{module}.gate_up_proj" in names:
        return InputSource(linear=f"{module}.gate_up_proj", rows=(inner, 2 * inner))
    return None


def _inner_size(config: ModelConfig, module: str) -> int:
    if config.experts is None:
        return config.intermediate_size
    if module.endswith("shared_expert"):
        return config.experts.shared_intermediate_size or config.intermediate_size
    if ".experts." in module:
        return config.experts.intermediate_size
    return config.intermediate_size
