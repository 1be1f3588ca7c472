"""The sampling defaults a model's makers recommend, from generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ingle.checkpoint.config_files import read_optional_object
from ingle.checkpoint.config_values import ConfigValues


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Recommended sampling values; None where the model's makers say nothing.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: From above 0 to 1.
        min_p: From 0 to 1.
        repetition_penalty: 1 is off.
        max_new_tokens: Tokens to generate at most.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def load_generation_defaults(path: Path | str) -> GenerationDefaults:
    """The defaults in the folder's generation_config.json; all None without one.

    ``do_sample`` is not looked at: a request's own temperature decides whether to sample.

    Raises:
        CheckpointError: Naming file, key and value when one cannot be used.
    """
    file = Path(path) / "generation_config.json"
    values = ConfigValues(str(file), read_optional_object(file))
    return GenerationDefaults(
        temperature=_number(values, "temperature", 0.0, 2.0),
        top_k=values.optional_size("top_k", low=0),
        top_p=_number(values, "top_p", 0.0, 1.0),
        min_p=_number(values, "min_p", 0.0, 1.0),
        repetition_penalty=_number(values, "repetition_penalty", 0.01, 100.0),
        max_new_tokens=values.optional_size("max_new_tokens"),
    )


def _number(values: ConfigValues, key: str, low: float, high: float) -> float | None:
    value = values.raw(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise values.wrong(key, value, f"a number from {low:g} to {high:g}")
    return float(value)
