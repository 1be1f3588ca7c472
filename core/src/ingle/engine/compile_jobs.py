"""What there is to compile for a loaded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingle.engine.background_compiler import BackgroundCompiler, CompileJob
from ingle.engine.decode_compiler import decode_compiler
from ingle.engine.function_compiler import FunctionCompiler
from ingle.engine.model_runner import ModelRunner
from ingle.model.decoder import Decoder, Model
from ingle.model.prompt_parts import prompt_functions
from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.device import DeviceInfo


def background_compiler(
    runner: ModelRunner, model: Model, functions: Sequence[CompiledFunction], device: DeviceInfo
) -> BackgroundCompiler | None:
    """A compiler with what is on disk in use already; None where there is nothing to compile.

    Args:
        runner: Runs ``model``.
        model: As it was loaded.
        functions: What its kernels call.
        device: Where it runs.
    """
    jobs: list[CompileJob] = []
    own = [*functions]
    if isinstance(model, Decoder) and _has_prompt_functions(model, device):
        own += prompt_functions(model)
    if own:
        kernels = FunctionCompiler(own, default_cache_folder())
        kernels.use_packages()
        jobs.append(kernels)
    if isinstance(model, Decoder):
        decode = decode_compiler(runner, model, device, functions)
        if decode is not None:
            jobs.append(decode)
    return BackgroundCompiler(jobs) if jobs else None


def _has_prompt_functions(model: Decoder, device: DeviceInfo) -> bool:
    return device.type == "cpu" and model.embedding.dtype is torch.bfloat16
