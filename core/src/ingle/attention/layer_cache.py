"""One layer's keys and values: two stores, each with the format that reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle.attention.metadata import SequenceSpan
from ingle.plugin.kv_cache import KVCacheFormat, KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one attention layer.

    Attributes:
        k_format: Format of the keys.
        v_format: Format of the values.
        k_store: Storage of the keys.
        v_store: Storage of the values.
    """

    k_format: KVCacheFormat
    v_format: KVCacheFormat
    k_store: KVStore
    v_store: KVStore

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores ``key`` and ``value`` [T, H, D] at ``slot_mapping`` int64 [T]."""
        self.k_format.write(self.k_store, key, slot_mapping)
        self.v_format.write(self.v_store, value, slot_mapping)

    def read(self, span: SequenceSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a whole sequence, each [H, seq_len, D]; in place where the layout
        and the block numbers allow."""
        return (
            _read(self.k_format, self.k_store, span),
            _read(self.v_format, self.v_store, span),
        )

    def read_stored(self, span: SequenceSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, each times its store's ``rotation`` where there is one."""
        return (
            _read(self.k_format, self.k_store, span, as_stored=True),
            _read(self.v_format, self.v_store, span, as_stored=True),
        )


def turned(x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """``x`` [..., D] times ``rotation`` float32 [D, D], summed in float32."""
    return x if rotation is None else (x.float() @ rotation).to(x.dtype)


def _read(
    form: KVCacheFormat, store: KVStore, span: SequenceSpan, *, as_stored: bool = False
) -> torch.Tensor:
    is_turned = as_stored and store.rotation is not None
    if span.first_block is not None and not is_turned:
        view = form.view(store, span.first_block, span.seq_len)
        if view is not None:
            return view
    num_used = -(-span.seq_len // store.geometry.block_size)
    device = next(iter(store.tensors().values())).device
    blocks = torch.tensor(span.block_table[:num_used], dtype=torch.int64, device=device)
    gather = form.gather_stored if is_turned else form.gather
    return gather(store, blocks, span.seq_len)
