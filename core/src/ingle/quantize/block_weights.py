"""One block's tensors in float32, and the model builder's view of them.

The block is the serving model's own layer object, built over linears that read their weights from a
dictionary, so that replacing one takes effect at once and every family the decoder computes can be
quantised.

Shape letters: N output features, K input features, T tokens, X experts, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ingle.errors import CheckpointError
from ingle.model.linear import Linear
from ingle.model.weights import WeightSource
from ingle.plugin.checkpoint import TensorReader
from ingle.plugin.device import DeviceInfo

Store = dict[str, torch.Tensor]
See = Callable[[tuple[str, ...], torch.Tensor], None]


class Watch:
    """Who is told of the inputs of linears; nobody while ``see`` is None."""

    def __init__(self) -> None:
        self.see: See | None = None


class WatchedLinear(Linear):
    """``x @ W.T + bias`` over weights in a store; tells the watch what it was given."""

    def __init__(self, store: Store, names: Sequence[str], watch: Watch) -> None:
        super().__init__([])
        self._store = store
        self._names = tuple(names)
        self._watch = watch

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], plus ``residual`` [T, N] when it is given."""
        if self._watch.see is not None:
            self._watch.see(self._names, x)
        store = self._store
        parts = [
            F.linear(x, store[f"{name}.weight"], store.get(f"{name}.bias")) for name in self._names
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out if residual is None else out + residual


class StoreSource(WeightSource):
    """A store as the model builder sees it.

    Attributes:
        sites: Names of the linears built so far; those in one tuple read the same input.
    """

    def __init__(self, store: Store, watch: Watch, device: DeviceInfo) -> None:
        self.dtype = torch.float32
        self.device = device
        self.sites: list[tuple[str, ...]] = []
        self._store = store
        self._watch = watch

    def has_linear(self, name: str) -> bool:
        """Whether the store has linear ``name``."""
        return f"{name}.weight" in self._store

    def has_tensor(self, name: str) -> bool:
        """Whether the store has tensor ``name``."""
        return name in self._store

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Tensor ``name``. Raises ``CheckpointError`` when it is missing or has another shape."""
        found = self._store.get(name)
        if found is None or tuple(found.shape) != shape:
            shown = "missing" if found is None else f"of shape {tuple(found.shape)}"
            raise CheckpointError(f"tensor {name!r} is {shown}, but config.json makes it {shape}.")
        return found

    def head_norm(self, name: str, num_heads: int, head_dim: int) -> torch.Tensor:
        """A per-head norm's weight [D]."""
        return self.tensor(name, (head_dim,))

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> Linear:
        """Linears ``names`` side by side.

        Raises:
            CheckpointError: When one is missing, or its shape is not what config.json says.
        """
        for name, size in zip(names, out_features, strict=True):
            self.tensor(f"{name}.weight", (size, in_features))
        self.sites.append(tuple(names))
        return WatchedLinear(self._store, names, self._watch)


def read_block(reader: TensorReader, prefix: str, device: torch.device) -> Store:
    """Every tensor under ``prefix`` as float32 on ``device``; stacked experts one by one."""
    store: Store = {}
    for name in reader.names(prefix):
        tensor = reader.get(name).to(device=device, dtype=torch.float32, copy=True)
        if tensor.dim() == 3:
            store.update(_unstacked(name, tensor))
        else:
            store[name] = tensor
    return store


def _unstacked(name: str, stacked: torch.Tensor) -> Store:
    """``experts.gate_up_proj`` [X, 2I, K] and ``experts.down_proj`` [X, K, I] as linears of their
    own, under the names that files of quantised experts have."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "down_proj":
        return {f"{prefix}.{i}.down_proj.weight": part for i, part in enumerate(stacked)}
    if leaf != "gate_up_proj":
        raise CheckpointError(f"tensor {name!r} has three dimensions and is no stack of experts.")
    parts: Store = {}
    for number, both in enumerate(stacked):
        gate, up = both.chunk(2)
        parts[f"{prefix}.{number}.gate_proj.weight"] = gate.contiguous()
        parts[f"{prefix}.{number}.up_proj.weight"] = up.contiguous()
    return parts
