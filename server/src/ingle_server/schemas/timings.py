"""How fast an answer came, in llama.cpp's shape."""

from __future__ import annotations

import msgspec


class Timings(msgspec.Struct, kw_only=True):
    """Times in milliseconds; ``prompt_n`` leaves out the ``cache_n`` tokens that came from the
    prefix cache, and ``queue_ms`` is the wait before the prompt's first step. ``draft_n`` tokens
    were guessed by speculation, and ``draft_n_accepted`` of them were right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queue_ms: float
    draft_n: int
    draft_n_accepted: int
