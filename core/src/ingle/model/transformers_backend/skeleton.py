"""transformers' model of a config.json, without weights and without code of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ingle.errors import CheckpointError
from ingle.model.transformers_backend.attention import NAME, register

_NOT_THE_MODELS: Final = ("quantization_config", "auto_map", "torch_dtype", "dtype")
"""Keys of config.json that say how weights are stored, or name code."""
LENGTH_DEPENDENT: Final = ("dynamic", "longrope")
"""Rotary scalings that transformers computes anew for every batch, from its longest sequence."""


def read_config(where: str, raw: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of ``raw``, a parsed config.json.

    Raises:
        CheckpointError: When transformers knows no decoder-only language model by it.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise _unknown(where, raw, f"transformers knows no model_type {kind!r}")
    kept = {key: value for key, value in raw.items() if key not in _NOT_THE_MODELS}
    try:
        config = CONFIG_MAPPING[kind].from_dict(kept)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: transformers refuses it: {str(error)[:300]}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise _unknown(where, raw, "it has an encoder, and Ingle serves decoder-only models")
    return config


def model_class(
    where: str, raw: Mapping[str, Any], config: PretrainedConfig
) -> type[PreTrainedModel]:
    """transformers' class for the causal language model of ``config``.

    Raises:
        CheckpointError: When there is none, or its attention cannot be replaced.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(where, raw, "transformers has no causal language model of it")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    named = raw.get("architectures")
    if isinstance(named, list) and named and named[0] != cls.__name__:
        raise _unknown(where, raw, f"transformers' model of that type is {cls.__name__}")
    return cls


def build_skeleton(
    where: str, raw: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model with every parameter and buffer on the meta device.

    Raises:
        CheckpointError: As ``read_config`` and ``model_class``.
    """
    config = read_config(where, raw)
    cls: Any = model_class(where, raw, config)
    register()
    try:
        with torch.device("meta"):
            model = cls._from_config(config, attn_implementation=NAME, dtype=dtype)
    except (TypeError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise _unknown(where, raw, f"transformers says: {str(error)[:300]}") from error
    evaluating: PreTrainedModel = model.eval()
    return evaluating


def rotaries(model: PreTrainedModel) -> Iterator[Any]:
    """The model's rotary embeddings whose scaling depends on the sequences' length."""
    for module in model.modules():
        if getattr(module, "rope_type", None) in LENGTH_DEPENDENT:
            yield module


def _unknown(where: str, raw: Mapping[str, Any], why: str) -> CheckpointError:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else f"model_type {raw.get('model_type')}"
    return CheckpointError(f"{where}: the architecture {str(name)[:80]} is not supported: {why}.")
