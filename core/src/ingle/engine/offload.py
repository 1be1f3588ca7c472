"""Layers that keep their weights in host memory: which, and across which boundary."""

from __future__ import annotations

import logging

import torch

from ingle.checkpoint.model_config import ModelConfig
from ingle.config import EngineConfig
from ingle.engine.memory_plan import MemoryPlan
from ingle.errors import ConfigError
from ingle.model.device_boundary import CudaBoundary
from ingle.model.streamed_layers import NUM_SLOTS, Offload
from ingle.plugin.device import DeviceInfo

logger = logging.getLogger("ingle.engine")


def choose_offload(
    config: EngineConfig, model: ModelConfig, device: DeviceInfo, plan: MemoryPlan
) -> Offload | None:
    """What --offload-layers or --cpu-offload-gb asks for; None when nothing, or nothing to be done.

    Raises:
        ConfigError: When the model's code is not Ingle's own, which alone can stream layers.
    """
    if not (config.offload_layers or config.cpu_offload_gb):
        return None
    if model.implementation != "ingle":
        raise ConfigError(
            "--offload-layers and --cpu-offload-gb work with Ingle's own decoders only, and "
            f"{model.architecture} runs on transformers' code; leave them out."
        )
    if device.type != "cuda":
        logger.warning(
            "--offload-layers and --cpu-offload-gb do nothing here: there is no card, and on a "
            "CPU all weights are in host memory anyway."
        )
        return None
    boundary = CudaBoundary(torch.device(device.torch_device), NUM_SLOTS)
    return Offload(num_layers=plan.offloaded_layers, boundary=boundary)
