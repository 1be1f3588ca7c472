"""The sampling flags of ``generate`` and ``chat``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingle.request import SamplingParams

_FROM_MODEL: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How to choose tokens. What is not given comes from the model's generation_config.json.

    Attributes:
        max_tokens: Tokens to generate at most.
        temperature: 0 always takes the likeliest token.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens at least this share of the likeliest one's probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen; 1 is
            off.
        presence_penalty: Subtracted once from every token generated before, -2 to 2.
        frequency_penalty: Subtracted per earlier generation of the token, -2 to 2.
        stop: Strings that end generation; not part of the text.
        ignore_eos: Go on past the end-of-sequence token.
    """

    max_tokens: int = 512
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request to a model with these ``generation_defaults``.

        Raises:
            RequestError: When a value cannot work.
        """
        chosen = {
            name: defaults.get(name) if getattr(self, name) is None else getattr(self, name)
            for name in _FROM_MODEL
        }
        return SamplingParams(
            **{name: value for name, value in chosen.items() if value is not None},
            max_tokens=self.max_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )
