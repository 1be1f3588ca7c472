"""``--quantization-param-path``: scales of an fp8 cache in a JSON file of their own.

vLLM's layout: ``{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.04}}}}``,
by rank and layer, one number for keys and values. Two more forms of a layer's entry are
understood: a list, one number per key/value head, and ``{"k": ..., "v": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ingle.errors import CheckpointError, ConfigError

OPTION = "--quantization-param-path"
RANK = "0"


class ScaleFile:
    """Reads the file as if its scales were tensors of the checkpoint.

    Args:
        path: The JSON file.
        num_layers: Layers of the model.

    Raises:
        ConfigError: Naming what is wrong with the file.
    """

    def __init__(self, path: str, num_layers: int) -> None:
        self._path = path
        self._tensors: dict[str, torch.Tensor] = {}
        for layer, entry in _entries(path).items():
            if not str(layer).isdecimal() or int(layer) >= num_layers:
                raise ConfigError(
                    f"{OPTION} {path} has scales for layer {layer!r}; the model has layers 0 to "
                    f"{num_layers - 1}."
                )
            sides = entry if isinstance(entry, Mapping) else {"k": entry, "v": entry}
            for side, value in sides.items():
                name = f"model.layers.{int(layer)}.self_attn.{side}_scale"
                self._tensors[name] = self._tensor(layer, side, value)

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """As ``TensorReader.names``."""
        return tuple(name for name in self._tensors if name.startswith(prefix))

    def get(self, name: str) -> torch.Tensor:
        """As ``TensorReader.get``."""
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no {name}.")
        return self._tensors[name]

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """As ``TensorReader.get_slice``."""
        return self.get(name).narrow(dim, start, stop - start)

    def _tensor(self, layer: str, side: str, value: Any) -> torch.Tensor:
        values = value if isinstance(value, list) and value else [value]
        is_numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
        if side not in ("k", "v") or not is_numbers:
            raise ConfigError(
                f"{OPTION} {self._path}, layer {layer}: a scale must be a number, a list with one "
                f'per head, or {{"k": ..., "v": ...}} of these; got {side}: {value!r}.'
            )
        return torch.tensor(values, dtype=torch.float32)


def _entries(path: str) -> Mapping[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{OPTION} {path} cannot be read: {error}.") from None
    found = content
    for key in ("kv_cache", "scaling_factor", RANK):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f'{OPTION} {path} holds no scales: it must have {{"kv_cache": {{"scaling_factor": '
            '{"0": {"<layer>": <scale>}}}}.'
        )
    return found
