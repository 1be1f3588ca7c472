"""Which safetensors files of a folder make up the model.

Folders are rarely clean, so the order of trust is:

1. ``output*.safetensors`` win over everything else. EXL2's converter writes them and copies the
   other files of the source model, so ``model*.safetensors`` beside them are the unquantised
   leftovers, and an index is the source's.
2. An index whose files are all there names the files.
3. Otherwise the index is absent or stale, and every safetensors file counts, except
   ``consolidated*`` (Mistral's own copy of the same weights) and ``adapter_model*`` beside others.

A numbered set (``model-00001-of-00003``) must be complete in every case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ingle.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
_NUMBERED: Final = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<total>\d{5,6})[.]safetensors"
)
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_SECONDARY: Final = ("consolidated", "adapter_model")
_MAX_SHARDS: Final = 100_000


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The files of the model in ``folder``, in name order.

    Raises:
        CheckpointError: When there is none, when the folder is of another kind (pickle, GGUF), or
            when a shard of a set is missing (named).
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.")
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if not present:
        raise CheckpointError(_nothing_found(folder))
    chosen = _choose(folder, present)
    _check_sets_complete(folder, chosen)
    return tuple(folder / name for name in chosen)


def _choose(folder: Path, present: list[str]) -> list[str]:
    outputs = [name for name in present if re.match(r"output(-\d+-of-\d+)?\.safetensors$", name)]
    if outputs:
        return outputs
    indexed = _indexed_files(folder)
    missing = sorted(set(indexed) - set(present))
    if indexed and not missing:
        return sorted(indexed)
    if missing and len(missing) < len(indexed):
        raise CheckpointError(
            f"{folder / missing[0]} is missing: {INDEX_NAME} names {len(indexed)} files and "
            f"{len(missing)} of them are not there. Download the model again."
        )
    return [name for name in present if not name.startswith(_SECONDARY)] or present


def _indexed_files(folder: Path) -> set[str]:
    """File names the index gives; empty without an index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return set()
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        raise CheckpointError(
            f"{path} is damaged: it must be a JSON object with a weight_map. Delete it or "
            "download it again."
        ) from None
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise CheckpointError(
                f"{path} names {str(name)[:80]!r}; an index may only name files beside itself."
            )
    return files


def _check_sets_complete(folder: Path, names: Iterable[str]) -> None:
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            sets.setdefault((match["stem"], match["total"]), set()).add(int(match["number"]))
    for (stem, total), numbers in sets.items():
        if int(total) > _MAX_SHARDS:
            raise CheckpointError(f"{folder}: {stem} claims to be cut into {int(total)} files.")
        for number in range(1, int(total) + 1):
            if number not in numbers:
                name = f"{stem}-{number:0{len(total)}d}-of-{total}.safetensors"
                raise CheckpointError(
                    f"{folder / name} is missing: {len(numbers)} of {int(total)} files are "
                    "there. Download the model again."
                )


def _nothing_found(folder: Path) -> str:
    suffixes = {p.suffix for p in folder.iterdir() if p.is_file()}
    if suffixes.intersection(_PICKLES):
        return (
            f"{folder} holds PyTorch pickle files (.bin, .pt, .pth), which can run code when "
            'loaded. Convert them once: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
            f".save_pretrained('{folder}')\""
        )
    if ".gguf" in suffixes:
        return (
            f"{folder} holds GGUF files, which are not read. Use the model's safetensors folder: "
            "on the hub usually the same name without -GGUF."
        )
    return f"{folder} holds no .safetensors file. Give a model folder or a hub id."
