"""The mixture of experts' part of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from ingle.checkpoint.architectures import ExpertTraits
from ingle.checkpoint.config_values import ConfigValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """A mixture of experts.

    Attributes:
        num_experts: Experts of a layer.
        num_chosen: Experts a token visits.
        intermediate_size: Width of one expert.
        normalise: Whether the visited experts' weights are made to sum to one.
        shared_intermediate_size: Width of the expert that every token visits; None: there is none.
        layers: Per layer whether it has experts; the others have one MLP.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalise: bool
    shared_intermediate_size: int | None
    layers: tuple[bool, ...]


def read_experts(
    config: ConfigValues, traits: ExpertTraits | None, num_layers: int
) -> ExpertConfig | None:
    """The mixture of experts; None when the architecture has none.

    Raises:
        CheckpointError: Naming a missing or wrong value.
    """
    if traits is None:
        return None
    key = traits.num_experts_key
    if not config.has(key) and config.has("num_local_experts"):
        key = "num_local_experts"  # transformers 5 writes every class's number under this name
    num_experts = config.size(key, traits.num_experts)
    num_chosen = config.size("num_experts_per_tok", traits.num_chosen)
    if num_chosen > num_experts:
        raise config.wrong("num_experts_per_tok", num_chosen, f"at most {num_experts}, {key}")
    normalise, shared = traits.normalise, traits.shared_size
    if normalise is None:
        normalise = config.flag("norm_topk_prob", False)
    if shared is not None:
        shared = config.size("shared_expert_intermediate_size", shared)
    return ExpertConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=config.size(traits.size_key, traits.size),
        normalise=normalise,
        shared_intermediate_size=shared,
        layers=_sparse_layers(config, num_layers),
    )


def _sparse_layers(config: ConfigValues, num_layers: int) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer, but those in ``mlp_only_layers``."""
    dense = config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of layer numbers")
    step = config.size("decoder_sparse_step", 1)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
