"""Calibration rows: equally long runs of token ids that a model is quantised over."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingle.errors import CheckpointError, ConfigError, IngleError
from ingle.quantize.calibration_text import read_texts
from ingle.quantize.config import CalibrationConfig
from ingle.quantize.tensor_file import write_text

if TYPE_CHECKING:
    from ingle.checkpoint.tokenizer import Tokenizer

SELF_WRITTEN: Final = "self"
"""What calibration is called that the model writes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rows, and where they come from.

    Attributes:
        rows: Token ids, each row of the same length.
        source: ``self``, or the path given.
    """

    rows: tuple[tuple[int, ...], ...]
    source: str

    @property
    def digest(self) -> str:
        """Tells sets of rows apart."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:16]


def rows_of_texts(config: CalibrationConfig, tokenizer: Tokenizer) -> Calibration:
    """Rows of the user's text: all of it in order, or a choice of rows spread over it.

    Raises:
        ConfigError: When the text cannot be read or is too short.
    """
    assert config.calibration is not None
    ids: list[int] = []
    # Rows are chosen from several times what is wanted; more of a large file is not encoded.
    enough = 8 * config.num_tokens
    for text in read_texts(Path(config.calibration)):
        ids += tokenizer.encode(text, add_special_tokens=True, allow_special=True)
        if len(ids) >= enough:
            break
    length = config.calibration_length
    cut = [tuple(ids[i : i + length]) for i in range(0, len(ids) - length + 1, length)]
    rows = list(dict.fromkeys(cut))
    if len(rows) < config.calibration_rows:
        raise ConfigError(
            f"--calibration {config.calibration} has {len(rows)} different rows of {length} "
            f"tokens; {config.calibration_rows} are wanted. Give more text, a lower "
            "--calibration-rows or a lower --calibration-length."
        )
    chosen = sorted(random.Random(config.seed).sample(range(len(rows)), config.calibration_rows))
    return Calibration(rows=tuple(rows[i] for i in chosen), source=config.calibration)


def cached_rows(config: CalibrationConfig, file: Path) -> Calibration | None:
    """Rows that a model wrote earlier, or None."""
    try:
        rows = tuple(tuple(map(int, row)) for row in json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    shape = {len(row) for row in rows}
    if len(rows) != config.calibration_rows or shape != {config.calibration_length}:
        return None
    return Calibration(rows=rows, source=SELF_WRITTEN)


def keep_rows(rows: Sequence[Sequence[int]], file: Path) -> None:
    """Leaves rows for the next run. A folder that cannot be written is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps([list(row) for row in rows]))
    except (OSError, IngleError):
        return


def cut_documents(
    documents: Sequence[Sequence[int]], config: CalibrationConfig
) -> tuple[tuple[int, ...], ...]:
    """Different documents, end to end, cut into rows.

    Raises:
        CheckpointError: When they are too few: the model ends every text at once.
    """
    ids = [token for document in dict.fromkeys(map(tuple, documents)) for token in document]
    length = config.calibration_length
    if len(ids) < config.num_tokens:
        raise CheckpointError(
            f"the model wrote {len(ids)} tokens of its own where {config.num_tokens} are wanted; "
            "give it a text with --calibration FILE."
        )
    return tuple(tuple(ids[i * length : (i + 1) * length]) for i in range(config.calibration_rows))
