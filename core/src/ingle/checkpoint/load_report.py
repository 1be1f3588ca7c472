"""How loading went: a progress bar while it lasts, and one block of text at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tqdm import tqdm

from ingle.checkpoint.safetensors import Checkpoint, open_checkpoint

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was loaded from a checkpoint.

    Attributes:
        path: The model folder.
        num_tensors: Tensors read, whole or in part.
        num_bytes: Bytes of them.
        seconds: Time from opening the checkpoint to the end of loading.
        leftovers: Tensors in the checkpoint that nothing asked for.
        missing: Tensors the model would have liked and did without.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    leftovers: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second."""
        return self.num_bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def text(self) -> str:
        """The report as one block of lines, without a newline at the end."""
        lines = [
            f"Loaded {self.num_tensors} tensors, {self.num_bytes / 1e9:.3f} GB, from {self.path} "
            f"in {self.seconds:.2f} s ({self.gigabytes_per_second:.2f} GB/s)"
        ]
        for label, names in (("not used", self.leftovers), ("not there", self.missing)):
            if names:
                lines.append(f"  {len(names)} tensors {label}: {shorten_names(names)}")
        return "\n".join(lines)


class LoadProgress:
    """Opens a checkpoint, follows what is read from it and reports.

    Use it in a ``with`` statement. The bar goes to standard error, and only to a terminal.

    Attributes:
        checkpoint: The opened checkpoint.

    Args:
        path: The model folder.
        show: Whether to show the bar; None shows it when standard error is a terminal.
        on_progress: Called with (bytes read, bytes in all) whenever some were read.

    Raises:
        CheckpointError: As ``open_checkpoint`` does.
    """

    def __init__(
        self,
        path: Path,
        show: bool | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._start = time.perf_counter()
        self.checkpoint: Checkpoint = open_checkpoint(path, self._advance)
        visible = sys.stderr.isatty() if show is None else show
        self._bar = tqdm(
            total=self.checkpoint.total_bytes,
            desc="Loading",
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=not visible,
            leave=False,
        )

    def report(self, missing: Sequence[str] = ()) -> LoadReport:
        """What has been loaded up to now, and how fast."""
        leftovers = self.checkpoint.unread()
        return LoadReport(
            path=self.checkpoint.path,
            num_tensors=len(self.checkpoint.names()) - len(leftovers),
            num_bytes=self.checkpoint.bytes_read,
            seconds=time.perf_counter() - self._start,
            leftovers=leftovers,
            missing=tuple(missing),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def _advance(self, num_bytes: int) -> None:
        self._bar.update(num_bytes)
        if self._on_progress is not None:
            self._on_progress(self.checkpoint.bytes_read, self.checkpoint.total_bytes)


def shorten_names(names: Sequence[str], shown: int = _SHOWN) -> str:
    """The first few names, and how many more there are."""
    listed = ", ".join(names[:shown])
    more = len(names) - shown
    return f"{listed} and {more} more" if more > 0 else listed
