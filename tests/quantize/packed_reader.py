"""Reads AWQ (gemm) and GPTQ folders from the description of the formats alone (sections 2 and 3).

Shares nothing with Ingle. Every code is cut out of the bit stream one by one, in numpy.

Letters: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: where logical column 8c + j lies in word c."""
Tensors = Mapping[str, torch.Tensor]


def dense_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model the folder stands for, linears as float32 [N, K]."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    block = config["quantization_config"]
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        tensors |= load_file(folder / file)
    packed = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    decode = {"awq": _awq, "gptq": _gptq}[block["quant_method"]]
    state = {f"{name}.weight": decode(name, tensors, block) for name in packed}
    parts = ("qweight", "qzeros", "scales", "g_idx")
    owned = {f"{name}.{part}" for name in packed for part in parts}
    return state | {name: t.float() for name, t in tensors.items() if name not in owned}


def _files(folder: Path) -> list[str]:
    """As the index names them; it has to name every tensor and no file that is missing."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return sorted(set(index["weight_map"].values()))


def stream(words: np.ndarray[Any, Any], bits: int, count: int) -> np.ndarray[Any, Any]:
    """``count`` values of ``bits`` bits from each row of int32 words: [rows, words] to int64
    [rows, count]. Value i lies in bits i*b to (i+1)*b of the row, lowest word first."""
    octets = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    single = np.unpackbits(octets.reshape(len(words), -1), axis=1, bitorder="little")
    values = single[:, : count * bits].reshape(len(words), count, bits).astype(np.int64)
    total: np.ndarray[Any, Any] = (values << np.arange(bits)).sum(2)
    return total


def _awq(name: str, tensors: Tensors, block: Mapping[str, Any]) -> torch.Tensor:
    bits, scales = block["bits"], tensors[f"{name}.scales"].float().numpy()
    inputs, outputs = tensors[f"{name}.qweight"].shape[0], scales.shape[1]
    codes = _awq_codes(tensors[f"{name}.qweight"].numpy(), bits, outputs)
    zeros = _awq_codes(tensors[f"{name}.qzeros"].numpy(), bits, outputs)
    size = inputs if block["group_size"] == -1 else block["group_size"]
    group = np.arange(inputs) // size
    return _weight(codes, zeros[group], scales[group])


def _awq_codes(words: np.ndarray[Any, Any], bits: int, outputs: int) -> np.ndarray[Any, Any]:
    fields = stream(words, bits, outputs)
    if bits != 4:
        return fields
    eights = fields.reshape(len(words), -1, 8)
    return eights[:, :, NIBBLE_OF_COLUMN].reshape(len(words), outputs)


def _gptq(name: str, tensors: Tensors, block: Mapping[str, Any]) -> torch.Tensor:
    bits = _gptq_bits(name, block)
    scales = tensors[f"{name}.scales"].float().numpy()
    group = tensors[f"{name}.g_idx"].numpy()
    qweight, qzeros = (tensors[f"{name}.{part}"].numpy() for part in ("qweight", "qzeros"))
    codes = stream(np.ascontiguousarray(qweight.T), bits, len(group)).T
    zeros = stream(qzeros, bits, scales.shape[1])
    if block.get("checkpoint_format", "gptq") == "gptq":
        # The first version stores one less; the files here never hold a zero point of 0 there.
        zeros = (zeros + 1) % (1 << bits)
    return _weight(codes, zeros[group], scales[group])


def _gptq_bits(name: str, block: Mapping[str, Any]) -> int:
    for pattern, changes in (block.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
            return int(changes.get("bits", block["bits"]))
    return int(block["bits"])


def _weight(
    codes: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]
) -> torch.Tensor:
    """``(code - zero) * scale``, from [K, N] each to float32 [N, K]."""
    values = (codes - zeros).astype(np.float32) * scales
    return torch.from_numpy(np.ascontiguousarray(values.T))
