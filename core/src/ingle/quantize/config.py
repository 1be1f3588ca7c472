"""What ``quantize`` is asked for. Free of torch: the command line is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from ingle.config import Device
from ingle.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """What a model is quantised over.

    Attributes:
        calibration: A text file, a JSON lines file with a `text`, a parquet file (needs pyarrow),
            or a folder of these; without it the model writes its own text.
        calibration_rows: Rows of text.
        calibration_length: Tokens of a row.
        seed: Seed of the text the model writes, and of the choice of rows of a file.
    """

    calibration: str | None = None
    calibration_rows: int = 16
    calibration_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("calibration_rows", 1), ("calibration_length", 8), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {least}, got {value}.")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.calibration_rows * self.calibration_length


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """What is made, and where.

    Attributes:
        format: The format to make; `ingle plugins` lists the formats.
        device: Where blocks are computed; `auto` takes CUDA when there is a card.
        measure_kl: Measures the result against the original when it is done, for the model card.
        revision: Branch, tag or commit of a hub id.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
    """

    format: str = ""
    device: Device = "auto"
    measure_kl: bool = True
    revision: str | None = None
    disable_plugin: tuple[str, ...] = ()
