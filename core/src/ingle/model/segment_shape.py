"""What a compiled segment is specialised on: sizes, and how each linear stores its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Self

import torch

from ingle.model.huge_pages import HugePages
from ingle.model.linear import Linear
from ingle.plugin.kv_cache import KVStore
from ingle.plugin.linear import LinearWeight, RowFunction

TensorShape = tuple[tuple[int, ...], str]
"""Dimensions and the name of the dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShape:
    """One weight of a linear.

    Attributes:
        function: The ``RowProduct``'s function, as ``module:name``.
        tensors: What it reads.
        in_features: K.
        out_features: N without padding.
        scale_dtype: The dtype of the scale that the input is multiplied by first, and which comes
            before ``tensors``; empty when there is none.
        is_ordered: Whether the input is then reordered, by indices that come before ``tensors``.
    """

    function: str
    tensors: tuple[TensorShape, ...]
    in_features: int
    out_features: int
    scale_dtype: str
    is_ordered: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        tensors = tuple((tuple(shape), dtype) for shape, dtype in values["tensors"])
        return cls(**{**values, "tensors": tensors})


@dataclass(frozen=True, slots=True, kw_only=True)
class SideShape:
    """How keys or values are stored, see ``CompiledSide``.

    Attributes:
        read, write: The functions, as ``module:name``.
        tensors: What follows [H, B, S] in each tensor's shape, and its dtype.
        constants: The same of the constants, whole.
        is_rotated: Whether what is stored is rotated; the first constant then is the rotation.
    """

    read: str = "ingle.plugin.kv_cache:read_plain"
    write: str = "ingle.plugin.kv_cache:write_plain"
    tensors: tuple[TensorShape, ...]
    constants: tuple[TensorShape, ...] = ()
    is_rotated: bool = False

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        lists = {
            name: tuple((tuple(shape), dtype) for shape, dtype in values[name])
            for name in ("tensors", "constants")
        }
        return cls(**{**values, **lists})


def plain_side(head_dim: int) -> SideShape:
    """Numbers kept as they are."""
    return SideShape(tensors=(((head_dim,), "bfloat16"),))


def side_shape(store: KVStore) -> SideShape | None:
    """How ``store`` is read and written in place, or None."""
    side = store.compiled()
    if side is None:
        return None
    return SideShape(
        read=_path(side.read),
        write=_path(side.write),
        tensors=tuple((tuple(one.shape[3:]), _name(one.dtype)) for one in side.tensors),
        constants=tuple((tuple(one.shape), _name(one.dtype)) for one in side.constants),
        is_rotated=store.rotation is not None,
    )


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear: its parts side by side, and whether a bias comes after them."""

    parts: tuple[PartShape, ...]
    has_bias: bool

    @property
    def in_features(self) -> int:
        """K."""
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        """N."""
        return sum(part.out_features for part in self.parts)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        parts = tuple(PartShape.read(part) for part in values["parts"])
        return cls(parts=parts, has_bias=values["has_bias"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryShape:
    """A layer up to its attention: norm, projection, rotation.

    Attributes:
        num_heads: Q.
        num_kv_heads: H.
        head_dim: D.
        eps: Of every norm.
        has_head_norms: Whether queries and keys are normed, head by head.
        qkv_proj: The joined projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    has_head_norms: bool
    qkv_proj: LinearShape

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Its linears, in the order their tensors come."""
        return (self.qkv_proj,)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        return cls(**{**values, "qkv_proj": LinearShape.read(values["qkv_proj"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A layer from its attention on, and the next one's entry.

    Attributes:
        hidden_size: E.
        intermediate_size: I.
        num_heads: Q.
        num_kv_heads: H.
        head_dim: D.
        eps: Of the norm.
        scale: Factor on the attention logits.
        block_size: Tokens in a block of the cache, as the segment cuts it.
        k_side, v_side: How keys and values are stored.
        o_proj: And the others: the linears.
        following: The next layer's entry, None after the last.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    block_size: int
    k_side: SideShape
    v_side: SideShape
    o_proj: LinearShape
    gate_up_proj: LinearShape
    down_proj: LinearShape
    following: EntryShape | None

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Its linears, in the order their tensors come."""
        own = (self.o_proj, self.gate_up_proj, self.down_proj)
        return own if self.following is None else (*own, *self.following.linears)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        names = ("o_proj", "gate_up_proj", "down_proj")
        linears = {name: LinearShape.read(values[name]) for name in names}
        entry = values["following"]
        following = None if entry is None else EntryShape.read(entry)
        sides = {name: SideShape.load(values[name]) for name in ("k_side", "v_side")}
        return cls(**{**values, **linears, **sides, "following": following})


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """Layers in a row; all but the last are followed by another."""

    layers: tuple[LayerShape, ...]

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Its linears, in the order their tensors come."""
        return tuple(linear for layer in self.layers for linear in layer.linears)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        return cls(layers=tuple(map(LayerShape.read, values["layers"])))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The output head: the epsilon of its norm, and its linear."""

    eps: float
    lm_head: LinearShape

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """Its linears, in the order their tensors come."""
        return (self.lm_head,)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From what ``asdict`` and JSON have made of one."""
        return cls(eps=values["eps"], lm_head=LinearShape.read(values["lm_head"]))


Shape = EntryShape | SegmentShape | HeadShape
KINDS: Mapping[str, type[Shape]] = {
    "qkv_proj": EntryShape,
    "layers": SegmentShape,
    "lm_head": HeadShape,
}
"""The kind that has a field of that name."""


def read_shape(values: Mapping[str, Any]) -> Shape:
    """A shape of any kind, from what ``asdict`` and JSON have made of it."""
    return next(kind for name, kind in KINDS.items() if name in values).read(values)


def row_functions(shape: Shape) -> list[str]:
    """The names of the functions it calls, sorted, each once."""
    names = {part.function for linear in shape.linears for part in linear.parts}
    if isinstance(shape, SegmentShape):
        sides = [side for layer in shape.layers for side in (layer.k_side, layer.v_side)]
        names |= {name for side in sides for name in (side.read, side.write)}
    return sorted(names)


def row_function(name: str) -> RowFunction:
    """The function that ``module:name`` says."""
    function: RowFunction = named_function(name)
    return function


def named_function(name: str) -> Callable[..., Any]:
    """The same of any kind."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


def linear_shape(linear: Linear) -> LinearShape | None:
    """How ``linear`` stores its weights, or None when one of them has no ``RowProduct``."""
    parts = [part_shape(part.weight) for part in linear.parts]
    known = tuple(part for part in parts if part is not None)
    if len(known) != len(parts):
        return None
    return LinearShape(parts=known, has_bias=linear.bias is not None)


def part_shape(weight: LinearWeight) -> PartShape | None:
    """How ``weight`` is stored, or None when it has no ``RowProduct``."""
    product = weight.row_product()
    if product is None:
        return None
    return PartShape(
        function=f"{product.function.__module__}:{product.function.__qualname__}",
        tensors=tuple((shape, _name(dtype)) for shape, dtype in product.shapes),
        in_features=weight.in_features,
        out_features=weight.out_features,
        scale_dtype="" if weight.input_scale is None else _name(weight.input_scale.dtype),
        is_ordered=weight.input_order is not None,
    )


def part_tensors(weight: LinearWeight, pages: HugePages, *, adopt: bool) -> list[torch.Tensor]:
    """What a segment is given for ``weight``, whose ``part_shape`` is not None: input scale, input
    order, then what its product reads, in ``pages`` where that is made anew. ``adopt``: the weight
    may write it over its own memory."""
    product = weight.row_product()
    assert product is not None
    before = [t for t in (weight.input_scale, weight.input_order) if t is not None]
    give = product.adopt if adopt and product.adopt is not None else product.tensors
    read = give()
    own = {_place(tensor) for tensor in weight.tensors().values()}
    return [*before, *(t if _place(t) in own else pages.copy(t) for t in read)]


def _place(tensor: torch.Tensor) -> int:
    """Where its memory begins; of an opaque tensor, which no other shares, nowhere."""
    return tensor.data_ptr() if tensor.layout is torch.strided else -1


def linear_tensors(linear: Linear, pages: HugePages, *, adopt: bool) -> list[torch.Tensor]:
    """What a segment is given for ``linear``: its parts' tensors, then its bias."""
    tensors = [
        tensor for part in linear.parts for tensor in part_tensors(part.weight, pages, adopt=adopt)
    ]
    return tensors if linear.bias is None else [*tensors, linear.bias]


def copied_bytes(linear: Linear) -> int:
    """Bytes that stay in memory beside the weights' own."""
    products = [part.weight.row_product() for part in linear.parts]
    return sum(product.copied_bytes for product in products if product is not None)


def as_json(shape: Shape) -> dict[str, Any]:
    """What ``read_shape`` reads."""
    return asdict(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
