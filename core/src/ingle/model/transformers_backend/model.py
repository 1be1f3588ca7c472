"""Runs transformers' model on Ingle's paged cache.

Shape letters: T tokens, E hidden size, Q query heads, H key/value heads, D head size, R rows,
V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.checkpoint.model_config import ModelConfig
from ingle.errors import CheckpointError
from ingle.model.decoder import AttentionBackend
from ingle.model.transformers_backend.attention import Slot, Step
from ingle.model.transformers_backend.skeleton import build_skeleton
from ingle.model.transformers_backend.weights import Filler
from ingle.model.weights import WeightSource


class _Hidden:
    """What a base model returns, as far as heads look at it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state


class _PassOn(torch.nn.Module):
    """Stands for the base model where only the head is to run."""

    @property
    def decoder(self) -> _PassOn:
        """Itself: some heads reach through the base model."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class _PagedStep:
    """A step over the paged cache."""

    def __init__(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        backends: Sequence[AttentionBackend],
    ) -> None:
        self._batch = batch
        self._caches = caches
        self._backends = backends

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Stores keys and values, and attends over everything stored."""
        index: Any = module.layer_idx
        cache = self._caches[index]
        size, own = key.shape[3], value.shape[3]
        # Where values are narrower than keys (latent attention) they are stored as wide as those.
        wide = value if own == size else torch.nn.functional.pad(value, (0, size - own))
        cache.write(_rows(key, value), _rows(wide, value), self._batch.slot_mapping)
        out = self._backends[index](_rows(query, value), cache, self._batch)
        heads: torch.Tensor = out.view(1, query.shape[2], query.shape[1], size)
        return heads[..., :own]


class _DryStep:
    """A step without a cache, to see whether the code runs."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Nothing is attended to."""
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class TransformersModel:
    """A ``Model`` around transformers' one.

    Args:
        model: Filled.
        backends: Attention of each layer.
    """

    def __init__(self, model: PreTrainedModel, backends: Sequence[AttentionBackend]) -> None:
        self._slot = Slot(model)
        self._base = getattr(model, model.base_model_prefix)
        self._head = _head_alone(model)
        self._backends = tuple(backends)

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The base model's output, [T, E]; writes ``caches``."""
        step = _PagedStep(batch, caches, self._backends)
        return self._run(batch.token_ids, batch.positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] of the rows that need logits to float32 [R, V]."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] itself: transformers' models end with their final norm."""
        return hidden

    def try_out(self, device: torch.device) -> None:
        """Runs one token through, so that code that cannot serve fails now.

        Raises:
            CheckpointError: With transformers' error.
        """
        token = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                self.logits(self._run(token, token, _DryStep()))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The architecture {type(self._head).__name__} is not supported: transformers' "
                f"code does not run on Ingle's layers ({str(error)[:200]})."
            ) from error

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        with self._slot.holding(step):
            hidden: torch.Tensor = self._base(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            ).last_hidden_state
        return hidden[0]


def build_transformers_model(
    where: str,
    raw: dict[str, Any],
    config: ModelConfig,
    source: WeightSource,
    backend: Callable[[int | None], AttentionBackend],
    max_model_len: int,
) -> TransformersModel:
    """Loads every weight of transformers' model of ``raw``, the parsed config.json.

    Args:
        where: config.json, for messages.
        raw: The parsed config.json.
        config: What was found out about it.
        source: Where weights come from.
        backend: Makes attention for a layer's sliding window (None: all).
        max_model_len: Tokens of a sequence at most.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
    """
    model = build_skeleton(where, raw, source.dtype)
    Filler(model, source, max_model_len).fill()
    windowed = (kind == "sliding_attention" for kind in config.layer_types)
    backends = [backend(config.sliding_window if window else None) for window in windowed]
    built = TransformersModel(model, backends)
    built.try_out(torch.device(source.device.torch_device))
    return built


def _head_alone(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with its base passed over: hidden states in, logits out, with whatever the
    class does to them on the way."""
    head = copy.copy(model)
    head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _PassOn()}
    return head


def _rows(heads: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``heads`` [1, H, T, D] as [T, H, D], in the dtype of ``like``."""
    return heads[0].transpose(0, 1).to(like.dtype).contiguous()
