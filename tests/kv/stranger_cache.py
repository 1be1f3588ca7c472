"""A cache format as somebody outside of this repository would write it: from the contract alone.

Numbers are kept as 16-bit integers in steps of 1/512, token after token.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ingle.plugin import KVCacheFormat, KVCacheGeometry, KVStore, hookimpl

INGLE_PLUGIN_API = (0, 1)
STEP = 1 / 512


class FixedPointStore(KVStore):
    def __init__(self, geometry, num_blocks, device):
        self.geometry, self.num_blocks = geometry, num_blocks
        shape = (num_blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
        self.data = torch.zeros(shape, dtype=torch.int16, device=device.torch_device)

    def tensors(self):
        return {"fixed": self.data}


class FixedPointCache(KVCacheFormat):
    name: ClassVar[str] = "fixed16"
    max_relative_error: ClassVar[dict[str, float]] = {
        "float32": 0.001,
        "float16": 0.001,
        "bfloat16": 0.003,
    }

    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        return geometry.block_size * geometry.num_kv_heads * geometry.head_dim * 2

    def allocate(self, geometry, num_blocks, device):
        return FixedPointStore(geometry, num_blocks, device)

    def write(self, store, x, slot_mapping):
        last = {slot: row for row, slot in enumerate(slot_mapping.tolist())}
        codes = (x.float() / STEP).round().clamp(-32767, 32767).to(torch.int16)
        rows = torch.tensor(list(last.values()), dtype=torch.int64)
        store.data.flatten(0, 1)[torch.tensor(list(last), dtype=torch.int64)] = codes[rows]

    def gather(self, store, block_table, seq_len):
        tokens = store.data[block_table].flatten(0, 1)[:seq_len]
        return (tokens.float() * STEP).to(store.geometry.dtype).transpose(0, 1)


@hookimpl
def ingle_kv_cache_formats(device):
    return [FixedPointCache()]
