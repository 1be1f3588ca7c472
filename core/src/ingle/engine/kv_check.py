"""What the chosen KV cache costs, against the exact one, over a short prompt.

Letters: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

KL_BOUND = 0.1
"""Nats per token above which a cache is warned of; e4m3 and int8 are far below it on models that
they suit, and a model whose keys overflow is far above."""
TOP1_BOUND = 0.7
"""Share of likeliest tokens that must stay the same; near ties change first and cost little."""
ROWS = 16
"""Positions whose logits exist at once."""
CACHE_FILE = "kv_check.json"
CHECK_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCheck:
    """How far the logits are from those with an exact cache.

    Attributes:
        kl: Mean KL(exact || chosen) of a token, in nats; NaN when logits are not finite.
        top1: Share of tokens for which both find the same one likeliest.
        num_tokens: Tokens compared.
    """

    kl: float
    top1: float
    num_tokens: int

    @property
    def is_good(self) -> bool:
        """Whether both figures are within bounds."""
        return self.kl <= KL_BOUND and self.top1 >= TOP1_BOUND

    def text(self, name: str) -> str:
        """One line for the log."""
        return (
            f"KV cache {name} against 16 bit: KL {self.kl:.4f} nats, top-1 agreement "
            f"{100 * self.top1:.1f} % over {self.num_tokens} tokens"
        )


def compare(
    exact: torch.Tensor, found: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
) -> CacheCheck:
    """Two runs' hidden states, [T, E], through one head to figures."""
    total, same, length = 0.0, 0, exact.shape[0]
    for start in range(0, length, ROWS):
        wanted = logits(exact[start : start + ROWS]).double().log_softmax(-1)
        got = logits(found[start : start + ROWS]).double().log_softmax(-1)
        total += float((wanted.exp() * (wanted - got)).sum())
        same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
    return CacheCheck(kl=total / length, top1=same / length, num_tokens=length)


def check_key(folder: Path, facts: dict[str, object]) -> str:
    """Names a model, by its files' names, sizes and times, and everything in ``facts``."""
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]
    described = json.dumps([str(folder), files, facts, CHECK_VERSION], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def recall(file: Path, key: str) -> CacheCheck | None:
    """The figures on file for ``key``; None when there are none that can be read."""
    entry = _read(file).get(key)
    try:
        return CacheCheck(**entry) if isinstance(entry, dict) else None
    except TypeError:
        return None


def remember(file: Path, key: str, check: CacheCheck) -> None:
    """Keeps figures that are numbers; a folder that cannot be written to costs only time."""
    from ingle.registry.self_check_cache import write_json

    if check.kl != check.kl:
        return
    try:
        write_json(file, {**_read(file), key: asdict(check)})
    except OSError:
        return


def _read(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
