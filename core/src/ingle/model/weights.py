"""Pulls a model's weights from a checkpoint by name, through the formats' loaders.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ingle.errors import CheckpointError
from ingle.model.linear import Linear, PreparedWeight
from ingle.plugin.checkpoint import TensorReader
from ingle.plugin.device import DeviceInfo
from ingle.plugin.linear import LinearSpec, LinearWeight, WeightLoader

Prepare = Callable[[LinearWeight], PreparedWeight]
"""Chooses kernels for a loaded weight and repacks it for them."""


class WeightSource:
    """One checkpoint as the model builder sees it.

    Args:
        reader: The checkpoint's tensors.
        loaders: Loaders to ask for a linear, in order; tensors decide, so a quantised
            checkpoint's own loader comes first and the dense one after it.
        prepare: What to do with every loaded weight.
        dtype: Activation dtype.
        device: Where the model will run.
        embeddings_on_host: Whether token embeddings stay in host memory.
    """

    def __init__(
        self,
        reader: TensorReader,
        loaders: Sequence[WeightLoader],
        prepare: Prepare,
        dtype: torch.dtype,
        device: DeviceInfo,
        embeddings_on_host: bool = False,
    ) -> None:
        self.reader = reader
        self.dtype = dtype
        self.device = device
        self._loaders = tuple((loader, loader.linears()) for loader in loaders)
        self._prepare = prepare
        self._embeddings_device = "cpu" if embeddings_on_host else device.torch_device
        self._names = frozenset(reader.names())

    def has_linear(self, name: str) -> bool:
        """Whether any loader stores linear ``name``."""
        return any(name in linears for _, linears in self._loaders)

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint holds tensor ``name``."""
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Tensor ``name`` in the activation dtype on the device.

        Raises:
            CheckpointError: When it is missing or its shape is not ``shape``.
        """
        return self._tensor(name, shape, self.device.torch_device, self.dtype)

    def tensor_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``tensor``, in ``dtype``.

        Raises:
            CheckpointError: As ``tensor``.
        """
        return self._tensor(name, shape, self.device.torch_device, dtype)

    def embedding(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Lookup table ``name`` in the activation dtype, where embeddings live.

        Raises:
            CheckpointError: When it is missing or its shape is not ``shape``.
        """
        return self._tensor(name, shape, self._embeddings_device, self.dtype)

    def _tensor(
        self, name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype
    ) -> torch.Tensor:
        found = self.reader.get(name)
        if tuple(found.shape) != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {tuple(found.shape)}, but config.json makes it "
                f"{shape}. The file does not belong to this config, or is damaged."
            )
        moved = found.to(device=device, dtype=dtype)
        # Small tensors are copied out of the mapping, so that the file can be evicted.
        return moved.clone() if moved.data_ptr() == found.data_ptr() else moved

    def head_norm(self, name: str, num_heads: int, head_dim: int) -> torch.Tensor:
        """A per-head norm's weight [D]. EXL2 files repeat it for every head, [H, D], with equal
        rows (specs/exl2.md section 6): the first is taken.

        Raises:
            CheckpointError: When its shape is neither, or its rows differ.
        """
        stored = self.reader.get(name)
        if stored.shape != (num_heads, head_dim):
            return self.tensor(name, (head_dim,))
        if not torch.equal(stored, stored[:1].expand_as(stored)):
            raise CheckpointError(
                f"tensor {name!r} has a norm of its own for each of {num_heads} heads; Ingle knows "
                "models with one for all."
            )
        return stored[0].to(device=self.device.torch_device, dtype=self.dtype, copy=True)

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> Linear:
        """Linears ``names``, their outputs side by side: fused into one where the format can.

        Raises:
            CheckpointError: When one is missing, or its shape is not what config.json says.
        """
        loaded = [
            self._load(self._spec(name, size, in_features))
            for name, size in zip(names, out_features, strict=True)
        ]
        weights = _share_orders([weight for _, weight in loaded])
        fused = _fuse(loaded[0][0], loaded, weights)
        bias = self._bias(names, out_features)
        return Linear([self._prepare(weight) for weight in fused], bias)

    def joined_linear(
        self, joined: str, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Linear:
        """As ``linear``; also when the checkpoint stores them side by side, as ``joined``.

        Raises:
            CheckpointError: As ``linear``.
        """
        if self.has_linear(joined):
            return self.linear([joined], [sum(out_features)], in_features)
        return self.linear(names, out_features, in_features)

    def expert(self, name: str, out_features: int, in_features: int, expert: int) -> Linear:
        """One expert's linear from the stacked tensor ``name`` [experts, N, K].

        Raises:
            CheckpointError: As ``linear``.
        """
        spec = replace(self._spec(name, out_features, in_features), expert=expert)
        _, weight = self._load(spec)
        return Linear([self._prepare(weight)])

    def tied_head(self, embedding: str, out_features: int, in_features: int) -> Linear:
        """An output head that shares the embedding's tensor ``embedding``.weight [N, K].

        Lookup tables are dense in every format, so the last loader, the dense one, reads it.
        """
        loader, _ = self._loaders[-1]
        spec = self._spec(embedding, out_features, in_features)
        weight = on_device(loader.load_linear(spec, self.reader), self.device)
        return Linear([self._prepare(weight)])

    def _spec(self, name: str, out_features: int, in_features: int) -> LinearSpec:
        return LinearSpec(
            name=name,
            in_features=in_features,
            out_features=out_features,
            dtype=self.dtype,
            device=self.device,
        )

    def _load(self, spec: LinearSpec) -> tuple[WeightLoader, LinearWeight]:
        name = spec.name
        for loader, linears in self._loaders:
            if name in linears:
                weight = _checked(name, loader.load_linear(spec, self.reader), spec)
                return loader, on_device(weight, self.device)
        raise CheckpointError(
            f"linear {name!r} is not in the checkpoint: no tensor of its name that any of the "
            "chosen formats can read. A shard may be missing, or config.json is of another model."
        )

    def _bias(self, names: Sequence[str], out_features: Sequence[int]) -> torch.Tensor | None:
        """The joined bias [N], or None when there is none or it is all zero (AutoGPTQ writes
        one of zeros for every layer). Formats that pad N pad the bias, so it is cut."""
        parts = []
        for name, size in zip(names, out_features, strict=True):
            if self.has_tensor(f"{name}.bias"):
                stored = self.reader.get(f"{name}.bias")
                if stored.dim() != 1 or stored.shape[0] < size:
                    raise CheckpointError(
                        f"tensor {name + '.bias'!r} has shape {tuple(stored.shape)}, "
                        f"wanted ({size},)."
                    )
                parts.append(stored[:size].to(self.dtype))
            else:
                parts.append(torch.zeros(size, dtype=self.dtype))
        joined = torch.cat(parts)
        return joined.to(self.device.torch_device) if bool(joined.any()) else None


def on_device(weight: LinearWeight, device: DeviceInfo) -> LinearWeight:
    """The weight with all its tensors on ``device``, where most formats do not put them."""
    target = torch.device(device.torch_device)
    tensors = weight.tensors()
    if all(tensor.device == target for tensor in tensors.values()):
        return weight
    return weight.with_tensors({name: tensor.to(target) for name, tensor in tensors.items()})


def _checked(name: str, weight: LinearWeight, spec: LinearSpec) -> LinearWeight:
    found, wanted = (
        (weight.out_features, weight.in_features),
        (spec.out_features, spec.in_features),
    )
    if found != wanted:
        raise CheckpointError(
            f"linear {name!r} is {found[0]} x {found[1]} (out x in) in the checkpoint, but "
            f"config.json makes it {wanted[0]} x {wanted[1]}."
        )
    return weight


def _share_orders(weights: list[LinearWeight]) -> list[LinearWeight]:
    """Lets weights with equal input orders share one tensor, so the input is gathered once."""
    first = weights[0].input_order
    for weight in weights[1:]:
        order = weight.input_order
        if first is not None and order is not None and torch.equal(first, order):
            weight.input_order = first
    return weights


def _fuse(
    loader: WeightLoader,
    loaded: Sequence[tuple[WeightLoader, LinearWeight]],
    weights: Sequence[LinearWeight],
) -> Sequence[LinearWeight]:
    if len(weights) == 1 or any(other is not loader for other, _ in loaded):
        return weights
    fused = loader.fuse(weights)
    return weights if fused is None else [fused]
