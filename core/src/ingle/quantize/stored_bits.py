"""Bits a model's weights take on disk, from headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from ingle.checkpoint.header import DTYPE_BYTES
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.linear import WeightLoader
from ingle.registry.loader import load_plugins

DENSE: Final = "dense"
HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens.weight"
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBits:
    """What ``Evaluation`` says of a model's size.

    Attributes:
        bits_per_weight: Of the layers' linears, everything a format keeps for them included.
        head_bits_per_weight: Of the output head; of the embeddings where it shares their tensor.
        total_bytes: Bytes of all tensors.
    """

    bits_per_weight: float
    head_bits_per_weight: float
    total_bytes: int


def stored_bits(path: Path, format_name: str) -> StoredBits:
    """The bits of the model folder ``path``, which the format ``format_name`` reads.

    Raises:
        CheckpointError: When the folder cannot be read.
    """
    with open_checkpoint(path) as checkpoint:
        info, total_bytes = checkpoint.info(), checkpoint.total_bytes
    num_layers = load_model_config(path, info).num_layers
    inner_bytes = inner_weights = head_bytes = head_weights = 0
    for name, weights, num_bytes in _linears(info, format_name):
        match = _LAYER.search(name)
        if match is not None and int(match[1]) < num_layers:
            inner_weights += weights
            inner_bytes += num_bytes
        elif name.endswith(HEAD):
            head_weights += weights
            head_bytes += num_bytes
    return StoredBits(
        bits_per_weight=8 * inner_bytes / max(1, inner_weights),
        head_bits_per_weight=(
            8 * head_bytes / head_weights if head_weights else _embedding_bits(info)
        ),
        total_bytes=total_bytes,
    )


def _linears(info: CheckpointInfo, format_name: str) -> Iterator[tuple[str, int, int]]:
    """(name, weights, bytes) of every linear; one the format stores goes before a dense one."""
    seen: set[str] = set()
    for loader in _loaders(info, format_name):
        for name, shape in loader.linears().items():
            if name not in seen:
                seen.add(name)
                # A stack of experts bears the name of its tensor, and its shape is one expert's.
                yield name, prod(info.tensor_shapes.get(name, shape)), loader.packed_bytes(name)


def _loaders(info: CheckpointInfo, format_name: str) -> list[WeightLoader]:
    offered = {offer.item.name: offer.item for offer in load_plugins().weight_formats()}
    return [offered[name].open(info) for name in dict.fromkeys((format_name, DENSE))]


def _embedding_bits(info: CheckpointInfo) -> float:
    return 8.0 * DTYPE_BYTES.get(info.tensor_dtypes.get(EMBEDDING, ""), 2)
