"""What a plugin is told about a checkpoint, and how it reads tensors from one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from ingle.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as its headers and JSON files describe it; no weight has been read.

    Attributes:
        path: The model folder.
        hf_config: The parsed ``config.json``.
        quantization_config: ``quantization_config`` of ``config.json`` (also when it sits under
            ``text_config``), or None. Files beside it (``quantize_config.json``,
            ``quant_config.json``) are in ``config_files``; a format reads them itself.
        config_files: Every other JSON object file of the folder that is at most 1 MiB, by file
            name: ``{"quantize_config.json": {...}}``. Tokenizer files are left out.
        tensor_shapes: Shape of every tensor, by name, over all shards.
        tensor_dtypes: safetensors dtype string (``"BF16"``, ``"I32"``) of every tensor, by name.
    """

    path: Path
    hf_config: Mapping[str, Any]
    quantization_config: Mapping[str, Any] | None = None
    config_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensor_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tensor_dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor name, in file order."""
        return tuple(self.tensor_shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """A format's claim on a checkpoint: why it thinks it can read it, and how sure it is.

    The highest priority wins; equal priorities of two formats are an error naming both.
    """

    reason: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Yes or no, and why. A reason is worth giving either way."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


EMBEDDING_NAME: Final = re.compile(r"(^|[._])(?!embed_out$)(wte|wpe|embed\w*|\w*embeddings?)$")
"""Module names of lookup tables: 2-D tensors named ``weight`` that are not linears."""


def refuse_packed_embeddings(linears: Mapping[str, Iterable[str]]) -> None:
    """Raises ``CheckpointError`` when a packed module (name -> its tensors) is a lookup table.

    Core looks rows up and never multiplies by them, so only dense tables are read.
    """
    for name, tensors in linears.items():
        if EMBEDDING_NAME.search(name):
            raise CheckpointError(
                f"tensor {next(iter(tensors))} is a packed lookup table; Ingle reads token "
                f"embeddings only dense, as {name}.weight. Use a checkpoint whose embeddings "
                "were not quantised."
            )


@runtime_checkable
class TensorReader(Protocol):
    """Reads tensors of one checkpoint by the checkpoint's own names; memory-mapped, on the CPU.

    Tensors handed out may share memory with the mapped file: never write to them in place.
    Reading a name that does not exist raises ``CheckpointError`` naming the tensor.
    """

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Every tensor name that starts with ``prefix``, in file order."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype and shape."""
        ...

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``start:stop`` along ``dim``; only those bytes need be read."""
        ...
