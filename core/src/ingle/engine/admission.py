"""Which requests the engine takes: checked before anything is copied or queued. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingle.errors import RequestError
from ingle.request import SamplingParams, check_token_ids

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Admission:
    """The model's limits, against which every request is held.

    Attributes:
        max_model_len: Tokens per sequence at most.
        vocab_size: Every token id is below it.
    """

    max_model_len: int
    vocab_size: int

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError, naming the field, unless the request can be computed."""
        self._check_prompt(prompt_token_ids)
        self._check_lengths(len(prompt_token_ids), params)
        check_token_ids(params, self.vocab_size)

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens to generate at most; without ``max_tokens``, to the end of the context."""
        room = self.max_model_len - num_prompt_tokens
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        if not prompt_token_ids:
            raise RequestError("The prompt is empty; it needs one token at least.", param="prompt")
        if {*map(type, prompt_token_ids)} == {int} and (
            min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self.vocab_size
        ):
            return
        wrong = next(t for t in prompt_token_ids if type(t) is not int or not self._known(t))
        raise RequestError(
            f"prompt holds {str(wrong)[:40]}; every token id must be an integer from 0 to "
            f"{self.vocab_size - 1}.",
            param="prompt",
        )

    def _known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _check_lengths(self, num_prompt: int, params: SamplingParams) -> None:
        # A prompt that fills the context leaves no room for a token of an answer.
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if num_prompt + min(wanted, 1) > self.max_model_len:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and this model's context is "
                f"{self.max_model_len}, answer included. Shorten the prompt.",
                param="prompt",
                code=TOO_LONG,
            )
        if num_prompt + wanted > self.max_model_len:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and max_tokens is {wanted}: together "
                f"{num_prompt + wanted}, but this model's context is {self.max_model_len}. Shorten "
                f"the prompt, or lower max_tokens to {self.max_model_len - num_prompt}.",
                param="max_tokens",
                code=TOO_LONG,
            )
