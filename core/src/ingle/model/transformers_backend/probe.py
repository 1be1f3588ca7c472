"""How transformers' model attends, found out by one forward pass without data.

Its own code is asked rather than its configuration read: names and defaults differ from model to
model, and a layer that does not attend (a state-space model's, say) shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from ingle.errors import CheckpointError, IngleError
from ingle.model.transformers_backend.attention import Slot
from ingle.model.transformers_backend.experts import is_experts
from ingle.model.transformers_backend.skeleton import rotaries

PROBE_TOKENS: Final = 3
_KNOWN_TENSORS: Final = ("position_ids", "cache_position", "position_embeddings", "cos", "sin")
"""Tensors that models pass to attention functions and ours does not need."""
_KNOWN_LAYERS: Final = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """How one layer attends.

    Attributes:
        num_heads, num_kv_heads: Query and key/value heads.
        head_dim: Size of a query's and of a key's head.
        scale: Factor on the logits.
        softcap: Bound of the logits, or None.
        window: Tokens a row attends to at most, itself included; None is all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None


class Recorder:
    """A step that computes nothing and writes down what is asked of it."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.layers: dict[int, LayerAttention] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Notes the layer; the result is empty, of the right shape."""
        _check_options(module, value, key, options)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise CheckpointError(f"{type(module).__name__} does not say which layer it is")
        scale = options.get("scaling")
        self.layers[index] = LayerAttention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            softcap=options.get("softcap"),
            window=_window(self._config, index, options),
        )
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class _NoExperts(torch.nn.Module):
    """Stands for a layer's experts, which sort rows by data that is not there."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(hidden_states)


def probe(model: PreTrainedModel) -> tuple[LayerAttention, ...]:
    """How each layer of ``model``, a skeleton, attends. The skeleton is of no use afterwards.

    Raises:
        CheckpointError: Why Ingle cannot attend for it.
    """
    config = model.config.get_text_config()
    for name, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(name, _NoExperts())
    for rotary in rotaries(model):
        rotary.rope_type = "default"
    recorder = Recorder(config)
    places = torch.empty(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    base = getattr(model, model.base_model_prefix)
    try:
        with torch.inference_mode(), Slot(model).holding(recorder):
            base(input_ids=places, position_ids=places, use_cache=False)
    except IngleError as error:
        raise _refused(model, str(error)) from error
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _refused(model, f"its code cannot be followed ({str(error)[:200]})") from error
    wanted = range(config.num_hidden_layers)
    if sorted(recorder.layers) != list(wanted):
        raise _refused(
            model, f"{len(recorder.layers)} of its {len(wanted)} layers attend the way Ingle serves"
        )
    return tuple(recorder.layers[index] for index in wanted)


def _check_options(
    module: torch.nn.Module, value: torch.Tensor, key: torch.Tensor, options: dict[str, Any]
) -> None:
    """Refuses whatever would change the result and is not computed here."""
    name = type(module).__name__
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise CheckpointError(f"{name} attends to what comes after, too")
    if value.shape[3] > key.shape[3]:
        raise CheckpointError(f"{name} has values wider than keys")
    for option, given in options.items():
        if isinstance(given, torch.Tensor) and option not in _KNOWN_TENSORS:
            raise CheckpointError(f"{name} passes {option}, which Ingle's attention does not know")


def _window(config: Any, index: int, options: dict[str, Any]) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] not in _KNOWN_LAYERS:
        raise CheckpointError(f"layer {index} is of the kind {kinds[index]}")
    if getattr(config, "attention_chunk_size", None) and not kinds:
        raise CheckpointError("it attends in chunks")
    given = options.get("sliding_window")
    if given is None and kinds and kinds[index] == "sliding_attention":
        given = config.sliding_window
    return None if given is None else int(given)


def _refused(model: PreTrainedModel, why: str) -> CheckpointError:
    name = type(model).__name__
    return CheckpointError(f"The architecture {name} is not supported: {why.rstrip('.')}.")
