"""Measures how a loaded model is launched fastest on its card: for ``ingle compile``.

Imports triton where there is one: only for cards.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ingle.engine.engine_core import EngineCore
from ingle.engine.linear_tuning import tune_linears
from ingle.plugin import DeviceInfo


def tune_launches(core: EngineCore, device: DeviceInfo) -> list[str]:
    """What was found, a line for each kind of weight, and for each number of sequences that
    attention was measured with; of a small model that guesses too. On a card that is absent each
    launch is compiled instead.

    Args:
        core: The engine, which runs nothing meanwhile.
        device: The card.
    """
    dtype: torch.dtype = getattr(torch, core.info.dtype)
    with torch.inference_mode():
        lines = tune_linears(core, dtype)
        if find_spec("triton") is not None:
            from ingle.engine.attention_tuning import tune_attention

            lines += tune_attention(core, device, dtype)
    return lines if core.draft is None else lines + tune_launches(core.draft, device)
