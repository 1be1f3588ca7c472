"""A model that is read a given text instead of writing its own.

Letters: T tokens, E hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.config import EngineConfig
from ingle.engine.device import choose_device
from ingle.engine.engine import build_engine_core
from ingle.engine.info import EngineInfo
from ingle.engine.model_runner import ModelRunner
from ingle.errors import CheckpointError
from ingle.model.decoder import Decoder

if TYPE_CHECKING:
    from ingle.checkpoint.tokenizer import Tokenizer
    from ingle.quantize.evaluation import EvaluationConfig

FIRST_BLOCK = 1
"""Block 0 is the null block; a window's blocks follow it without gaps."""


class ForcedModel:
    """A loaded model and, once it has read the windows, its last hidden states.

    Attributes:
        info: What the engine says about itself.
        tokenizer: The model's tokenizer.
        hidden: [T, E] on the CPU, one row per token read; in the activation dtype.
        device: Where the model computes.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, runner: ModelRunner) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.hidden = torch.empty(0)
        self.device = runner.device
        self._runner: ModelRunner | None = runner
        self._logits: Callable[[torch.Tensor], torch.Tensor] = runner.model.logits

    def read(self, windows: Sequence[Sequence[int]]) -> None:
        """Reads every window from its start, through the KV cache as serving does.

        Raises:
            CheckpointError: When what it computes is not finite.
        """
        from tqdm import tqdm

        assert self._runner is not None
        parts = []
        with torch.inference_mode():
            for window in tqdm(windows, desc=self.info.model[-40:], unit="window", disable=None):
                batch = _whole(window, self._runner.block_size, self.device)
                parts.append(self._runner.model.hidden_states(batch, self._runner.caches).cpu())
        self.hidden = torch.cat(parts)
        if not bool(self.hidden.isfinite().all()):
            raise CheckpointError(f"{self.info.model} computes values that are not finite numbers.")

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the hidden states at ``rows`` (int64 [R]): float32 [R, V]."""
        with torch.inference_mode():
            return self._logits(self.hidden[rows].to(self.device))

    def head_only(self) -> ForcedModel:
        """The same with what ``logits`` needs and nothing else: layers and cache are let go."""
        assert self._runner is not None
        model = self._runner.model
        kept = ForcedModel(self.info, self.tokenizer, self._runner)
        kept.hidden = self.hidden
        if isinstance(model, Decoder):
            kept._logits = replace(model, layers=()).logits
        kept._runner = None
        return kept

    def close(self) -> None:
        """Lets the model go."""
        self._runner = None
        self.hidden = torch.empty(0)
        self._logits = _closed


def _closed(hidden: torch.Tensor) -> torch.Tensor:
    raise ValueError("this model has been closed")


def load_forced(config: EvaluationConfig, model: str, cache: str) -> ForcedModel:
    """Loads a model for reading windows, with a cache of one window.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
    """
    on_cpu = choose_device(config.device).type == "cpu"
    engine = EngineConfig(
        model=model,
        kv_cache_dtype=cache,
        dtype="float32" if config.dtype == "auto" and on_cpu else config.dtype,
        device=config.device,
        max_model_len=config.window,
        max_num_batched_tokens=config.window,
        single_user_mode=True,
        enforce_eager=True,
    )
    core = build_engine_core(engine)
    if core.tokenizer is None or not isinstance(core.runner, ModelRunner):
        raise CheckpointError(f"{model} has no tokenizer; comparing models needs one.")
    return ForcedModel(core.info, core.tokenizer, core.runner)


def _whole(window: Sequence[int], block_size: int, device: torch.device) -> ForwardBatch:
    """A window as one sequence that is computed in one step."""
    length = len(window)
    positions = torch.arange(length, device=device)
    table = range(FIRST_BLOCK, FIRST_BLOCK - (-length // block_size))
    span = SequenceSpan(
        start=0, stop=length, seq_len=length, block_table=table, first_block=FIRST_BLOCK
    )
    return ForwardBatch(
        token_ids=torch.tensor(list(window), device=device),
        positions=positions,
        slot_mapping=positions + FIRST_BLOCK * block_size,
        spans=(span,),
    )
