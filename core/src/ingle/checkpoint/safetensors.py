"""A checkpoint of one or many safetensors files: what is in it, and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import safetensors

from ingle.checkpoint.config_files import read_companions, read_optional_object
from ingle.checkpoint.header import ShardHeader, TensorEntry, read_header
from ingle.checkpoint.shards import find_shards
from ingle.errors import CheckpointError
from ingle.plugin.checkpoint import CheckpointInfo

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """The tensors of one model folder, memory-mapped on the CPU; implements ``TensorReader``.

    Tensors share memory with the files: never write to them in place. Files are mapped when a
    tensor of theirs is first asked for, after every header of the folder has been checked.

    Attributes:
        path: The model folder.
        total_bytes: Bytes of all tensors.
        bytes_read: Bytes of the tensors (and slices) handed out so far.
    """

    def __init__(
        self,
        path: Path,
        headers: tuple[ShardHeader, ...],
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self._entries, self._homes = _merge(headers)
        self._on_read = on_read
        self._files: dict[Path, Any] = {}
        self._read: set[str] = set()
        self.bytes_read = 0
        self.total_bytes = sum(entry.nbytes for entry in self._entries.values())

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Every tensor name that starts with ``prefix``, in file order."""
        return tuple(name for name in self._entries if name.startswith(prefix))

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype and shape.

        Raises:
            CheckpointError: Naming the tensor when there is none, or its file when it changed.
        """
        entry = self._entry(name)
        try:
            tensor: torch.Tensor = self._file(name).get_tensor(name)
        except (safetensors.SafetensorError, ValueError) as error:
            raise self._unreadable(name, error) from error
        self._count(name, entry.nbytes)
        return tensor

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``start:stop`` along ``dim``; only those bytes need be read.

        Raises:
            CheckpointError: Naming the tensor, when it does not exist or the slice lies outside.
        """
        entry = self._entry(name)
        rank = len(entry.shape)
        if not 0 <= dim < rank or not 0 <= start <= stop <= entry.shape[dim]:
            raise CheckpointError(
                f"{self._homes[name]}: tensor {name} has shape {list(entry.shape)}; elements "
                f"{start}:{stop} along dimension {dim} are not in it."
            )
        index = (slice(None),) * dim + (slice(start, stop),)
        try:
            tensor: torch.Tensor = self._file(name).get_slice(name)[index]
        except (safetensors.SafetensorError, ValueError) as error:
            raise self._unreadable(name, error) from error
        self._count(name, tensor.numel() * tensor.element_size())
        return tensor

    def info(self, needs_config: bool = True) -> CheckpointInfo:
        """What the headers and JSON files say; reads no tensor.

        Args:
            needs_config: Whether config.json must be there; else a missing one is empty.

        Raises:
            CheckpointError: When config.json is missing or damaged.
        """
        config_path = self.path / "config.json"
        if needs_config and not config_path.is_file():
            raise CheckpointError(f"{config_path} is missing: {self.path} is no model folder.")
        config = read_optional_object(config_path)
        return CheckpointInfo(
            path=self.path,
            hf_config=config,
            quantization_config=_quantization_config(config_path, config),
            config_files=read_companions(self.path),
            tensor_shapes=MappingProxyType({n: e.shape for n, e in self._entries.items()}),
            tensor_dtypes=MappingProxyType({n: e.dtype for n, e in self._entries.items()}),
        )

    def file_of(self, name: str) -> Path:
        """The file that holds tensor ``name``. Raises ``CheckpointError`` when none does."""
        self._entry(name)
        return self._homes[name]

    def unread(self) -> tuple[str, ...]:
        """Names of tensors of which nothing has been handed out, in file order."""
        return tuple(name for name in self._entries if name not in self._read)

    def close(self) -> None:
        """Lets go of the mapped files; tensors already handed out stay valid."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}.")
        return entry

    def _file(self, name: str) -> Any:
        path = self._homes[name]
        if path not in self._files:
            try:
                self._files[path] = safetensors.safe_open(path, framework="pt", device="cpu")
            except OSError as error:
                raise self._unreadable(name, error) from error
        return self._files[path]

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._homes[name]}: tensor {name} cannot be read: {error}.")

    def _count(self, name: str, nbytes: int) -> None:
        self._read.add(name)
        self.bytes_read += nbytes
        if self._on_read is not None:
            self._on_read(nbytes)


def open_checkpoint(path: Path | str, on_read: Callable[[int], None] | None = None) -> Checkpoint:
    """Opens a model folder, or a single ``.safetensors`` file, and checks every header.

    Args:
        path: The folder or file.
        on_read: Called with the number of bytes each time a tensor or slice is handed out.

    Raises:
        CheckpointError: Naming the file (and the tensor) when anything about them is wrong.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        return Checkpoint(path.parent, (read_header(path),), on_read)
    headers = tuple(read_header(shard) for shard in find_shards(path))
    return Checkpoint(path, headers, on_read)


def _merge(
    headers: tuple[ShardHeader, ...],
) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """All tensors of all files, and the file each lies in."""
    entries: dict[str, TensorEntry] = {}
    homes: dict[str, Path] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            if name in homes:
                raise CheckpointError(
                    f"Tensor {name} is in both {homes[name]} and {header.path}. "
                    "Remove the files that do not belong to the model."
                )
            entries[name], homes[name] = entry, header.path
    return entries, homes


def _quantization_config(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """``quantization_config`` at the top or under ``text_config``."""
    text_config = config.get("text_config")
    nested = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    found = config.get("quantization_config", nested)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"{path}: quantization_config must be a JSON object.")
    return found
