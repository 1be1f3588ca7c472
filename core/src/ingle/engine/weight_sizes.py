"""What a checkpoint's weights take in memory, from headers alone. All sizes in bytes. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from ingle.checkpoint.model_config import ModelConfig
from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.linear import WeightLoader

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head"
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """The weights by what can be done about them.

    Attributes:
        layers_bytes: All layers: linears as packed, norms and biases in the activation dtype.
        linear_values: Weights in the layers' linears, unpacked: what bits per weight refer to.
        linear_bytes: Bytes of those.
        head_bytes: The output head; a tied one is a copy of its own.
        embeddings_bytes: The token embeddings.
        other_bytes: Everything else: the last norm, mostly.
        streamable_bytes: By layer, first to last, what its linears take as packed: that may come
            over from host memory.
        copied_bytes: What compiled decode steps on a CPU read beside the weights as prompts do:
            the dense linears and the scales of the others once more; 0 where a linear cannot be
            compiled.
    """

    layers_bytes: int
    linear_values: int
    linear_bytes: int
    head_bytes: int
    embeddings_bytes: int
    other_bytes: int = 0
    streamable_bytes: tuple[int, ...] = ()
    copied_bytes: int = 0

    @property
    def without_embeddings(self) -> int:
        """What has to be on the device in any case."""
        return self.layers_bytes + self.head_bytes + self.other_bytes

    @property
    def total_bytes(self) -> int:
        """All weights."""
        return self.without_embeddings + self.embeddings_bytes

    @property
    def bits_per_weight(self) -> float:
        """Of the layers' linears, scales included."""
        return 8 * self.linear_bytes / max(1, self.linear_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    name: str
    tensors: tuple[str, ...]
    values: int
    num_bytes: int
    row_product_bytes: int | None


def weigh(
    info: CheckpointInfo,
    model: ModelConfig,
    packed: WeightLoader | None,
    dense: WeightLoader,
    itemsize: int,
) -> WeightSizes:
    """The sizes of ``info``'s weights once they are loaded.

    Args:
        info: The checkpoint's headers.
        model: Its configuration.
        packed: The loader of its quantised linears, or None when there are none.
        dense: The loader of its dense linears; these are converted to the activation dtype.
        itemsize: Bytes of one activation.
    """
    linears = [*_packed_linears(packed), *_dense_linears(packed, dense, itemsize)]
    linears = [linear for linear in linears if _is_loaded(linear.name, model)]
    inner = [linear for linear in linears if _LAYER.search(linear.name)]
    rest = _rest(info, model, [*_packed_tensors(packed), *_dense_tensors(dense)])
    rest_bytes = {name: prod(info.tensor_shapes[name]) * itemsize for name in rest}
    layers_rest = sum(size for name, size in rest_bytes.items() if _LAYER.search(name))
    head = sum(linear.num_bytes for linear in linears if linear.name.endswith(HEAD))
    linear_bytes = sum(linear.num_bytes for linear in inner)
    embeddings = model.vocab_size * model.hidden_size * itemsize
    others = sum(linear.num_bytes for linear in linears) - linear_bytes - head
    return WeightSizes(
        layers_bytes=linear_bytes + layers_rest,
        linear_values=sum(linear.values for linear in inner),
        linear_bytes=linear_bytes,
        head_bytes=head or embeddings,
        embeddings_bytes=embeddings,
        other_bytes=others + sum(rest_bytes.values()) - layers_rest,
        streamable_bytes=_by_layer(inner, model.num_layers),
        copied_bytes=_copied_bytes(linears, 0 if head else embeddings),
    )


def _by_layer(linears: Sequence[_Linear], num_layers: int) -> tuple[int, ...]:
    """Bytes of each layer's linears."""
    sizes = [0] * num_layers
    for linear in linears:
        match = _LAYER.search(linear.name)
        assert match is not None
        sizes[int(match[1])] += linear.num_bytes
    return tuple(sizes)


def _copied_bytes(linears: Sequence[_Linear], tied_head: int) -> int:
    """What the layers' linears and the head copy, when all of them can be compiled. ``tied_head``:
    bytes of a head that is the embedding."""
    read = [x for x in linears if _LAYER.search(x.name) or x.name.endswith(HEAD)]
    copies = [linear.row_product_bytes for linear in read]
    known = [size for size in copies if size is not None]
    return tied_head + sum(known) if len(known) == len(copies) else 0


def _packed_linears(packed: WeightLoader | None) -> Iterator[_Linear]:
    if packed is None:
        return
    for name, (outputs, inputs) in packed.linears().items():
        yield _Linear(
            name=name,
            tensors=packed.tensor_names(name),
            values=outputs * inputs,
            num_bytes=packed.packed_bytes(name),
            row_product_bytes=packed.row_product_bytes(name),
        )


def _dense_linears(
    packed: WeightLoader | None, dense: WeightLoader, itemsize: int
) -> Iterator[_Linear]:
    """Dense linears that no packed one of the same name goes before."""
    claimed = packed.linears() if packed is not None else {}
    for name, (outputs, inputs) in dense.linears().items():
        if name not in claimed:
            values = outputs * inputs
            yield _Linear(
                name=name,
                tensors=dense.tensor_names(name),
                values=values,
                num_bytes=values * itemsize,
                row_product_bytes=dense.row_product_bytes(name),
            )


def _packed_tensors(packed: WeightLoader | None) -> Iterator[str]:
    if packed is not None:
        for name in packed.linears():
            yield from packed.tensor_names(name)


def _dense_tensors(dense: WeightLoader) -> Iterator[str]:
    for name in dense.linears():
        yield from dense.tensor_names(name)


def _rest(info: CheckpointInfo, model: ModelConfig, taken: Sequence[str]) -> list[str]:
    """Tensors that belong to no linear and are loaded: norms and biases."""
    skipped = {*taken, EMBEDDING}
    return [n for n in info.tensor_shapes if n not in skipped and _is_loaded(n, model)]


def _is_loaded(name: str, model: ModelConfig) -> bool:
    """Whether the decoder asks for it: layers past the last one (drafting heads) are left."""
    match = _LAYER.search(name)
    return match is None or int(match[1]) < model.num_layers
