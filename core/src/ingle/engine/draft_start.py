"""Loads the small model that guesses for a big one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingle.checkpoint.hub import resolve_model
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.config import EngineConfig
from ingle.engine.device_guess import DeviceGuesses
from ingle.engine.draft_model import DraftModel
from ingle.errors import ConfigError

if TYPE_CHECKING:
    from ingle.engine.engine_core import EngineCore

logger = logging.getLogger("ingle.engine")

MAX_SEQUENCES: Final = 4
"""Sequences of full length in the small model's cache. Guessing pays for few at once."""
DEFAULT_LENGTH: Final = 8192
"""Tokens of a sequence for which it guesses, when no context length was asked for."""


def load_draft(config: EngineConfig, build: Callable[[EngineConfig], EngineCore]) -> EngineCore:
    """The small model of ``config``, loaded with a cache that is small and fixed.

    Args:
        config: Of the big model.
        build: Builds an engine.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
    """
    assert config.draft_model is not None
    longest = _longest(resolve_model(config.draft_model, None))
    asked = config.max_model_len if isinstance(config.max_model_len, int) else DEFAULT_LENGTH
    core = build(
        EngineConfig(
            model=config.draft_model,
            dtype=config.dtype,
            device=config.device,
            model_impl=config.model_impl,
            max_model_len=min(longest, asked),
            on_memory="shrink",
            max_num_seqs=min(MAX_SEQUENCES, config.max_running),
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            enable_prefix_caching=False,
            enforce_eager=config.enforce_eager,
            speculative_model="none",
            strict_plugins=config.strict_plugins,
            disable_plugin=config.disable_plugin,
        )
    )
    logger.info("%s guesses, with contexts up to %d", config.draft_model, core.info.max_model_len)
    return core


def _longest(path: Path) -> int:
    with open_checkpoint(path) as checkpoint:
        return load_model_config(path, checkpoint.info()).longest_context


def draft_model(draft: EngineCore, name: str, tokenizer: Tokenizer, vocab_size: int) -> DraftModel:
    """The small model as a guesser for one with this tokenizer and ``vocab_size`` rows.

    Raises:
        ConfigError: When the two number their tokens differently.
    """
    assert draft.tokenizer is not None
    check_same_tokens(name, draft.tokenizer, tokenizer)
    scheduler, ahead = draft.scheduler, draft.ahead
    return DraftModel(
        draft.runner if ahead is None else ahead.runner,  # its plans go back and forth
        scheduler.blocks,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
        vocab_size=min(draft.info.vocab_size, vocab_size),
        on_device=None if ahead is None else DeviceGuesses(step=ahead.step),
    )


def check_same_tokens(name: str, draft: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raises ConfigError when a token that both vocabularies have the number of is not the same in
    both."""
    for token_id in range(min(draft.vocab_size, tokenizer.vocab_size)):
        one, other = draft.id_to_token(token_id), tokenizer.id_to_token(token_id)
        if one != other:
            raise ConfigError(
                f"--speculative-model {name} has another vocabulary: its token {token_id} is "
                f"{one!r}, the model's {other!r}. Take a smaller model of the same family."
            )
