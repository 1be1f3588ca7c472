"""What a run has finished, on disk, so that a killed one goes on where it was.

A folder ``.quantize`` inside the output holds ``run.json`` (what run it is, and how far), and the
hidden states that enter the next block. Files appear under their names only when they are whole,
and the state is written after the block's weights: at worst a block is done twice, to the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ingle.errors import CheckpointError, ConfigError
from ingle.quantize.tensor_file import read_tensors, write_tensors, write_text, writing

FOLDER: Final = ".quantize"
MEASURE: Final = "measure"
QUANTIZE: Final = "quantize"


class Progress:
    """The state of one run.

    Attributes:
        stage: ``measure`` or ``quantize``.
        next_block: First block of the stage that is not done.
        measurements: What the first pass has given so far, in block order.
        index: Tensor name to file name, of what is written.
        sizes: Tensor name to bytes, of what is written.
    """

    def __init__(self, out: Path, stage: str, run: Mapping[str, Any]) -> None:
        self.folder = out / FOLDER
        self.stage = stage
        self.next_block = 0
        self.measurements: list[Mapping[str, Any]] = []
        self.index: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._run = dict(run)

    @classmethod
    def open(cls, out: Path, stage: str, run: Mapping[str, Any]) -> Progress:
        """The state in the output folder ``out``, or a new one.

        Args:
            out: The output; made when it does not exist.
            stage: Where a new run starts.
            run: Everything that decides the bytes: model, format, options, calibration.

        Raises:
            ConfigError: When ``out`` holds something else, or a run of other options.
        """
        progress = cls(out, stage, run)
        state = progress.folder / "run.json"
        if state.is_file():
            progress._resume(out, state)
        elif out.exists() and (not out.is_dir() or _is_used(out)):
            raise ConfigError(f"{out} exists already and is not empty; give a new folder.")
        with writing(out):
            progress.folder.mkdir(parents=True, exist_ok=True)
        return progress

    def _resume(self, out: Path, state: Path) -> None:
        try:
            found = json.loads(state.read_text(encoding="utf-8"))
            self.stage, self.next_block = found["stage"], int(found["next_block"])
            self.measurements = list(found["measurements"])
            self.index, self.sizes = dict(found["index"]), dict(found["sizes"])
            run = dict(found["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{state} is damaged; delete {out} and run again.") from error
        if run != json.loads(json.dumps(self._run)):
            changed = sorted(k for k in {*run, *self._run} if run.get(k) != self._run.get(k))
            raise ConfigError(
                f"{out} holds a run that was interrupted and differs in {', '.join(changed)}. "
                "Repeat its command to finish it, or give a new folder."
            )

    def begin_quantizing(self) -> None:
        """From the first pass to the second."""
        self.stage, self.next_block = QUANTIZE, 0
        self._save()

    def finish_block(
        self, hidden: torch.Tensor | None, written: Mapping[str, int], file: str = ""
    ) -> None:
        """A block is done: ``hidden`` enters the next one; ``written`` are its tensors' bytes."""
        self.next_block += 1
        self.index.update(dict.fromkeys(written, file))
        self.sizes.update(written)
        if hidden is not None:
            write_tensors(self._hidden_file(self.next_block), {"hidden": hidden})
        self._save()
        for stale in self.folder.glob("hidden-*.safetensors"):
            if stale != self._hidden_file(self.next_block):
                stale.unlink()

    def hidden(self) -> torch.Tensor | None:
        """What enters the next block: float32 [T, E], or None when that is the first block."""
        if self.next_block == 0:
            return None
        return read_tensors(self._hidden_file(self.next_block))["hidden"]

    def finish(self) -> None:
        """Removes the state: the output is whole."""
        shutil.rmtree(self.folder)

    def _hidden_file(self, block: int) -> Path:
        return self.folder / f"hidden-{self.stage}-{block}.safetensors"

    def _save(self) -> None:
        state = {
            "run": self._run,
            "stage": self.stage,
            "next_block": self.next_block,
            "measurements": self.measurements,
            "index": self.index,
            "sizes": self.sizes,
        }
        write_text(self.folder / "run.json", json.dumps(state))


def fingerprint(path: Path, names: Mapping[str, tuple[int, ...]]) -> str:
    """Which model a folder holds: config, tensor names and shapes, sizes and times of its files."""
    digest = hashlib.sha256()
    digest.update((path / "config.json").read_bytes())
    digest.update(json.dumps({name: list(shape) for name, shape in names.items()}).encode())
    for file in sorted(path.glob("*.safetensors")):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _is_used(out: Path) -> bool:
    """Whether a folder holds more than the empty state folder of a run that never began."""
    return any(entry.name != FOLDER for entry in out.iterdir())
