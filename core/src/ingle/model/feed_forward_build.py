"""Builds feed-forward blocks from a checkpoint: one MLP, or a mixture of experts.

Experts are stored in one of three ways: under a name each, as in Qwen's files
(``experts.3.gate_proj``) or Mixtral's (``experts.3.w1``), or stacked along a first dimension
(``experts.gate_up_proj``), as transformers 5 keeps them. The tensors decide.
"""

from __future__ import annotations

from ingle.checkpoint.model_config import ModelConfig
from ingle.errors import CheckpointError
from ingle.model.experts import ExpertMLP, SharedExpert
from ingle.model.feed_forward import MLP
from ingle.model.layers import activation, prompt_gate
from ingle.model.linear import Linear
from ingle.model.weights import WeightSource

BLOCK_NAMES = ("mlp", "block_sparse_moe")
"""Names of a layer's mixture of experts."""
EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down projections."""


def build_mlp(config: ModelConfig, source: WeightSource, prefix: str, inner: int) -> MLP:
    """The gated MLP under ``prefix``, ``inner`` wide.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
    """
    gate_up = source.joined_linear(
        f"{prefix}.gate_up_proj",
        [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
        [inner, inner],
        config.hidden_size,
    )
    down = source.linear([f"{prefix}.down_proj"], [config.hidden_size], inner)
    return _mlp(config, gate_up, down)


def build_experts(config: ModelConfig, source: WeightSource, prefix: str) -> ExpertMLP:
    """The mixture of experts of the layer under ``prefix``.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
    """
    experts = config.experts
    assert experts is not None
    block = _block_name(source, prefix)
    return ExpertMLP(
        router=source.linear([f"{block}.gate"], [experts.num_experts], config.hidden_size),
        experts=_experts(config, source, f"{block}.experts"),
        num_chosen=experts.num_chosen,
        normalise=experts.normalise,
        shared=_shared(config, source, block),
    )


def _block_name(source: WeightSource, prefix: str) -> str:
    for name in BLOCK_NAMES:
        if source.has_linear(f"{prefix}.{name}.gate"):
            return f"{prefix}.{name}"
    tried = " nor ".join(f"{prefix}.{name}.gate" for name in BLOCK_NAMES)
    raise CheckpointError(
        f"the checkpoint has neither {tried}, but config.json says that this layer has experts. "
        "A shard may be missing, or config.json is of another model."
    )


def _experts(config: ModelConfig, source: WeightSource, prefix: str) -> tuple[MLP, ...]:
    assert config.experts is not None
    numbers = range(config.experts.num_experts)
    if source.has_linear(f"{prefix}.gate_up_proj"):
        return tuple(_stacked(config, source, prefix, number) for number in numbers)
    return tuple(_named(config, source, f"{prefix}.{number}") for number in numbers)


def _stacked(config: ModelConfig, source: WeightSource, prefix: str, number: int) -> MLP:
    assert config.experts is not None
    inner, hidden = config.experts.intermediate_size, config.hidden_size
    gate_up = source.expert(f"{prefix}.gate_up_proj", 2 * inner, hidden, number)
    down = source.expert(f"{prefix}.down_proj", hidden, inner, number)
    return _mlp(config, gate_up, down)


def _named(config: ModelConfig, source: WeightSource, prefix: str) -> MLP:
    assert config.experts is not None
    inner, hidden = config.experts.intermediate_size, config.hidden_size
    known = (names for names in EXPERT_NAMES if source.has_linear(f"{prefix}.{names[2]}"))
    gate, up, down = next(known, EXPERT_NAMES[0])
    return _mlp(
        config,
        source.linear([f"{prefix}.{gate}", f"{prefix}.{up}"], [inner, inner], hidden),
        source.linear([f"{prefix}.{down}"], [hidden], inner),
    )


def _shared(config: ModelConfig, source: WeightSource, block: str) -> SharedExpert | None:
    assert config.experts is not None
    inner = config.experts.shared_intermediate_size
    if inner is None:
        return None
    return SharedExpert(
        mlp=build_mlp(config, source, f"{block}.shared_expert", inner),
        gate=source.linear([f"{block}.shared_expert_gate"], [1], config.hidden_size),
    )


def _mlp(config: ModelConfig, gate_up: Linear, down: Linear) -> MLP:
    act = activation(config.hidden_act)
    return MLP(gate_up_proj=gate_up, down_proj=down, activation=act, of_prompts=prompt_gate(act))
