"""Text that a model writes itself, from its first token on at temperature 1."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tqdm import tqdm

from ingle.checkpoint.model_config import ModelConfig
from ingle.config import Device, EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.quantize.config import CalibrationConfig
from ingle.request import SamplingParams

_SIDE_BY_SIDE: Final = 32
"""Documents that are written at the same time."""
_ROUNDS: Final = 8
"""Short documents are followed by more, so many times."""


def write_documents(
    model: Path, shape: ModelConfig, config: CalibrationConfig, device: Device
) -> list[list[int]]:
    """Documents of the model at ``model``, enough for ``config`` unless it ends them all at once.

    Each has a seed of its own, so what is written does not depend on what is written beside it.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why the model cannot be loaded.
    """
    engine = EngineConfig(
        model=str(model),
        device=device,
        max_model_len=config.calibration_length + 8,
        max_num_seqs=_SIDE_BY_SIDE,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    core = build_engine_core(engine)
    start = _first_token(core, shape)
    documents: list[list[int]] = []
    with tqdm(
        total=config.num_tokens,
        desc="Writing calibration text",
        unit="token",
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:
        for number in range(_ROUNDS):
            missing = config.num_tokens - _count(documents)
            if missing <= 0:
                break
            wanted = -(-missing // config.calibration_length)
            seeds = [config.seed * 1_000_003 + number * 10_007 + i for i in range(wanted)]
            documents += _write(core, start, seeds, config.calibration_length, bar)
    return documents


def _first_token(core: EngineCore, shape: ModelConfig) -> int:
    """BOS as the config has it, else the tokenizer's, else what ends texts."""
    tokenizer = core.tokenizer
    candidates = [shape.bos_token_id]
    if tokenizer is not None:
        candidates += [tokenizer.bos_token_id, tokenizer.eos_token_id]
    candidates += list(shape.eos_token_ids)
    return next((token for token in candidates if token is not None), 0)


def _write(
    core: EngineCore, start: int, seeds: Sequence[int], length: int, bar: tqdm[None]
) -> list[list[int]]:
    written: dict[str, list[int]] = {}
    for seed in seeds:
        written[str(seed)] = [start]
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=length - 1)
        core.add_request(str(seed), [start], params)
    while core.has_work():
        for output in core.step():
            for completion in output.outputs:
                written[output.request_id] += completion.token_ids
                bar.update(len(completion.token_ids))
    return [document for document in written.values() if len(document) > 1]


def _count(documents: Sequence[Sequence[int]]) -> int:
    return sum(len(document) for document in set(map(tuple, documents)))
