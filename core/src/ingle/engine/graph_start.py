"""Whether an engine's decode steps run ahead as CUDA graphs, decided once the model is loaded."""

from __future__ import annotations

import logging
import time
from importlib.util import find_spec

import torch

from ingle.config import EngineConfig
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.run_ahead import RunAhead
from ingle.model.decoder import Decoder, Model
from ingle.plugin.device import DeviceInfo

logger = logging.getLogger("ingle.engine")


def begin_running_ahead(
    config: EngineConfig, core: EngineCore, model: Model, device: DeviceInfo
) -> str:
    """Puts graphs in front of an engine's runner, where its steps can be graphs.

    Returns:
        A line that says so, or why not; empty where nobody expects them: on a CPU.
    """
    runner = core.runner
    if device.type != "cuda" or not isinstance(runner, ModelRunner):
        return ""
    reason = _refusal(config, model, runner)
    if not reason:
        begun = time.perf_counter()
        reason = _capture(core, model, runner)
        if not reason:
            seconds = time.perf_counter() - begun
            line = f"Decode steps are CUDA graphs, begun one ahead; captured in {seconds:.1f} s."
            logger.info(line)
            return line
    line = f"Decode steps are no CUDA graphs: {reason}."
    logger.log(logging.INFO if config.enforce_eager else logging.WARNING, line)
    return line


def _refusal(config: EngineConfig, model: Model, runner: ModelRunner) -> str:
    if config.enforce_eager:
        return "--enforce-eager"
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'ingle[triton]')"
    from ingle.engine.graph_step import why_not

    return why_not(model, runner.caches)


def _capture(core: EngineCore, model: Model, runner: ModelRunner) -> str:
    """Makes the graphs; what is wrong, or an empty string."""
    from ingle.engine.graph_step import ROW_COUNTS, GraphStep, StepSize

    assert isinstance(model, Decoder)
    scheduler, block_size = core.scheduler, runner.block_size
    size = StepSize(
        num_rows=min(ROW_COUNTS[-1], scheduler.limits.max_num_seqs),
        num_blocks=-(-scheduler.max_model_len // block_size),
        block_size=block_size,
    )
    step = GraphStep(model, runner.caches, size)
    if step.is_card:
        try:
            step.capture()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"capturing one failed with {lines[0]}"
    core.ahead = RunAhead(runner, step, block_size, core.info.eos_token_ids)
    core.runner = core.ahead
    scheduler.looks_ahead = True
    return ""
