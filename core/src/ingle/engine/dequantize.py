"""A packed checkpoint written out as a dense one: every packed linear becomes one ``.weight``.

What is written is what the format's own ``dequantize`` gives, the oracle of every kernel, so the
result is also how anyone can check a loader.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from ingle.checkpoint.permissions import readable_as_its_folder
from ingle.checkpoint.safetensors import Checkpoint, open_checkpoint
from ingle.checkpoint.shards import INDEX_NAME
from ingle.engine.dense_plan import PackedLinear, plan_linears
from ingle.errors import CheckpointError, ConfigError
from ingle.plugin import CheckpointInfo, DeviceInfo, LinearSpec, WeightLoader
from ingle.registry.choose import SIDECAR_FILES, choose_weight_format
from ingle.registry.plugin_registry import PluginRegistry

SHARD_BYTES: Final = 4_000_000_000
"""A file is closed when it has this many bytes; so much is in memory at a time."""

_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".part")
_LEFT_BEHIND: Final = (*SIDECAR_FILES, "quantization_config.json", "config.json")
_HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCopy:
    """What was written.

    Attributes:
        path: The folder.
        format_name: The format that read the source.
        num_linears: Linears that were packed.
        num_copied: Tensors taken over as they were.
        num_bytes: Bytes of all tensors.
        divided: Tensors taken over that some linear's input must still be divided by.
    """

    path: Path
    format_name: str
    num_linears: int
    num_copied: int
    num_bytes: int
    divided: tuple[str, ...] = ()

    def text(self) -> str:
        """One line, and one more for what a reader of the copy has to know."""
        lines = [
            f"Wrote {self.num_linears} linears of {self.format_name} as dense weights and "
            f"{self.num_copied} tensors as they were, {self.num_bytes / 1e9:.3f} GB, "
            f"to {self.path}"
        ]
        if self.divided:
            lines.append(
                f"{', '.join(self.divided)}: divide the activations before the next linear, in "
                "the copy as in the source; most readers of dense models do not"
            )
        return "\n".join(lines)


def dequantize_checkpoint(
    source: Path, out: Path, dtype: torch.dtype, registry: PluginRegistry, requested: str = "auto"
) -> DenseCopy:
    """Writes ``source`` to the new folder ``out`` with every packed linear dense, in ``dtype``.

    Args:
        source: A folder with safetensors files; a whole model or as little as one linear.
        out: The folder to write; it must not exist, or be empty.
        dtype: Of the weights that were packed. All other tensors keep theirs.
        registry: Who reads formats.
        requested: The format's name, or ``auto``.

    Raises:
        ConfigError: When ``out`` holds something.
        CheckpointError: When nothing in ``source`` is packed, or it cannot be read.
        PluginError: When no format reads it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not empty; give a new folder.")
    with open_checkpoint(source) as checkpoint:
        info = checkpoint.info(needs_config=False)
        chosen = choose_weight_format(registry, info, requested).format
        copier = _Copier(checkpoint, info, chosen.open(info), dtype)
        if not copier.linears:
            raise CheckpointError(f"{source} has no packed linears; it is dense already.")
        partial = out.with_name(f".{out.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        num_bytes = _write_shards(partial, copier)
        _copy_files(source, partial, _dense_config(info, copier, dtype))
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return DenseCopy(
        path=out,
        format_name=chosen.name,
        num_linears=len(copier.linears),
        num_copied=len(copier.kept),
        num_bytes=num_bytes,
        divided=copier.divided,
    )


class _Copier:
    """Gives the tensors of the dense copy, in the order of the source.

    Attributes:
        linears: The packed linears by name.
        kept: Names of the tensors taken over.
        divided: Those of them that belong to a linear without being its own: activation scales.
    """

    def __init__(
        self, checkpoint: Checkpoint, info: CheckpointInfo, loader: WeightLoader, dtype: torch.dtype
    ) -> None:
        self._checkpoint, self._loader, self._dtype = checkpoint, loader, dtype
        self.linears = plan_linears(info, loader)
        owners = {name: linear for linear in self.linears.values() for name in linear.own_tensors}
        weights = {f"{name}.weight" for name in self.linears}
        self._owners = owners
        self.kept = tuple(n for n in info.tensor_names if n not in owners and n not in weights)
        self.divided = tuple(n for linear in self.linears.values() for n in linear.other_tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        kept, done = frozenset(self.kept), set()
        for name in self._checkpoint.names():
            owner = self._owners.get(name)
            if name in kept:
                yield name, self._kept(name)
            elif owner is not None and owner.name not in done:
                done.add(owner.name)
                yield f"{owner.name}.weight", self._dense(owner)

    def _dense(self, linear: PackedLinear) -> torch.Tensor:
        """[N, K] in the dtype asked for. Activation scales stay where they are, outside of it."""
        spec = LinearSpec(
            name=linear.name,
            in_features=linear.in_features,
            out_features=linear.out_features,
            dtype=self._dtype,
            device=DeviceInfo(type="cpu"),
        )
        weight = self._loader.load_linear(spec, self._checkpoint)
        weight.input_scale = None
        return weight.dequantize()[: linear.out_features].to(self._dtype).contiguous()

    def _kept(self, name: str) -> torch.Tensor:
        """As stored; the bias of a padded linear is cut, and a norm repeated for every head, as
        some formats keep it, is given once, as dense models do."""
        tensor = self._checkpoint.get(name)
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and module in self.linears and tensor.dim() == 1:
            return tensor[: self.linears[module].out_features].clone()
        if module.endswith(("q_norm", "k_norm")) and tensor.dim() == 2 and len(tensor):
            same = torch.equal(tensor, tensor[:1].expand_as(tensor))
            return tensor[0].clone() if same else tensor
        return tensor


def _write_shards(folder: Path, copier: _Copier) -> int:
    """Writes all tensors to files of at most ``SHARD_BYTES``, and an index when there are more
    than one; bytes written."""
    shards: list[tuple[str, ...]] = []
    pending: dict[str, torch.Tensor] = {}
    total = pending_bytes = 0

    def flush() -> None:
        part = folder / f"{len(shards)}.part"
        save_file(pending, part, metadata={"format": "pt"})
        readable_as_its_folder(part)
        shards.append(tuple(pending))
        pending.clear()

    for name, tensor in tqdm(copier, desc="Writing", disable=not sys.stderr.isatty(), leave=False):
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > SHARD_BYTES:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += size
        total += size
    flush()
    _name_shards(folder, shards, total)
    return total


def _name_shards(folder: Path, shards: list[tuple[str, ...]], total: int) -> None:
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        homes = {name: file for file, inside in zip(names, shards, strict=True) for name in inside}
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)


def _dense_config(info: CheckpointInfo, copier: _Copier, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of the copy: no quantisation, the new dtype, and a head of its own where
    a packed one was (its values are not those of the embedding any more)."""
    config = _without_quantisation(info.hf_config, dtype)
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = _without_quantisation(config["text_config"], dtype)
    if any(name.rpartition(".")[2] == _HEAD for name in copier.linears):
        for part in (config, config.get("text_config", {})):
            if part.get("tie_word_embeddings"):
                part["tie_word_embeddings"] = False
    return config


def _without_quantisation(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    for key in ("torch_dtype", "dtype"):
        if key in kept:
            kept[key] = str(dtype).removeprefix("torch.")
    return kept


def _copy_files(source: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Tokenizer, templates and all other plain files beside the weights."""
    for file in sorted(source.iterdir()):
        skipped = file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")
        if file.is_file() and not skipped and file.name not in _LEFT_BEHIND:
            shutil.copy(file, folder / file.name)
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text, encoding="utf-8")
