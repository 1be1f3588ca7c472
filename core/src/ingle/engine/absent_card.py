"""Kernels compiled for a card that is not in this machine, for the container's build.

A model is loaded as if the card were there: plugins choose, pack and launch what they would there,
and every launch compiles its kernel for the card and runs nothing. So what lies in Triton's cache
afterwards is what the same code asks for on the card, by construction. Imports triton: only where
it is installed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.launch_tuning import tune_launches
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.errors import ConfigError
from ingle.plugin.device import DeviceInfo
from ingle.request import SamplingParams

WARP = 32
CACHE_BYTES = 64 << 20
"""For the cache of an engine that computes nothing."""
COMPUTE: dict[str, tuple[int, int]] = {
    "A10": (86, 72),
    "A100": (80, 108),
    "A40": (86, 84),
    "H100": (90, 132),
    "H200": (90, 132),
    "L4": (89, 58),
    "L40S": (89, 142),
    "RTX 3060": (86, 28),
    "RTX 3070": (86, 46),
    "RTX 3080": (86, 68),
    "RTX 3090": (86, 82),
    "RTX 3090 Ti": (86, 84),
    "RTX 4060 Ti": (89, 34),
    "RTX 4070": (89, 46),
    "RTX 4080": (89, 76),
    "RTX 4090": (89, 128),
    "RTX 5070": (120, 48),
    "RTX 5080": (120, 84),
    "RTX 5090": (120, 170),
    "RTX 6000 Ada": (89, 142),
    "RTX A6000": (86, 84),
}
"""Architecture and multiprocessors as NVIDIA states them; not read from cards. The second decides
how products are split, which is part of a kernel."""


@dataclass(slots=True)
class Compiled:
    """What compiling came to.

    Attributes:
        num_compiled: Kernels that were compiled.
        num_found: Kernels that lay in Triton's cache already.
        seconds: What compiling took.
    """

    num_compiled: int = 0
    num_found: int = 0
    seconds: float = field(default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """What is launched, so that it is compiled.

    Attributes:
        batches: Sequences decoded together.
        prompt: Tokens of a prompt, more than decode kernels take rows.
        every_launch: Whether also what measuring on the card will launch.
    """

    batches: Sequence[int]
    prompt: int
    every_launch: bool = False


def find_card(asked: str) -> DeviceInfo:
    """The card that ``asked`` names: a name of ``COMPUTE``, or ``sm_89:128``, an architecture and a
    number of multiprocessors.

    Raises:
        ConfigError: When it is neither.
    """
    names = {name.lower(): name for name in COMPUTE}
    given = re.fullmatch(r"sm_(\d+):(\d+)", asked.strip())
    if given is None and asked.strip().lower() not in names:
        raise ConfigError(
            f"--card {asked} is not known. Give an architecture and the card's multiprocessors, "
            f"such as sm_89:128, or one of {', '.join(COMPUTE)}."
        )
    name = asked.strip() if given else names[asked.strip().lower()]
    arch, count = (int(given[1]), int(given[2])) if given else COMPUTE[name]
    return DeviceInfo(
        type="cuda",
        capability=(arch // 10, arch % 10),
        total_memory=80 << 30,
        name=name,
        multi_processors=count,
        is_absent=True,
    )


def compile_for(config: EngineConfig, card: DeviceInfo, exercise: Exercise) -> Compiled:
    """Compiles what a model's engine launches on ``card``.

    Args:
        config: The model and its options.
        card: From ``find_card``.
        exercise: What is launched.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
    """
    quiet = replace(
        config, device="cuda", enforce_eager=True, kv_cache_memory_bytes=CACHE_BYTES,
        on_memory="shrink", calculate_kv_scales=False,
    )  # fmt: skip
    found = Compiled()
    with pretending(card, found):
        core = build_engine_core(quiet, device=card)
        _exercise_all(core, exercise.batches, exercise.prompt)
        if core.draft is not None:
            _exercise_all(core.draft, [1], exercise.prompt)
        if exercise.every_launch:
            tune_launches(core, card)
    return found


@contextmanager
def pretending(card: DeviceInfo, found: Compiled) -> Iterator[None]:
    """Lets launches compile for ``card`` and run nothing; counts into ``found``."""
    assert card.capability is not None
    target = GPUTarget("cuda", card.capability[0] * 10 + card.capability[1], WARP)

    def listen(
        *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        found.num_compiled += not cache_hit
        found.num_found += cache_hit

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found.seconds += time.perf_counter() - begun
        return kernel

    before = driver._active, knobs.compilation.listener
    driver.set_active(_AbsentDriver(target))
    knobs.compilation.listener = listen
    try:
        with (
            _replaced(JITFunction, "run", compile_only),
            _replaced(torch.version, "cuda", torch.version.cuda or "absent"),
            _OnCard(),
        ):
            yield
    finally:
        driver._active, knobs.compilation.listener = before


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _AbsentDriver:
    """What Triton asks a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _OnCard(TorchFunctionMode):
    """Tensors say that they are on a card: what decides which instructions a kernel has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


def _exercise_all(core: EngineCore, batches: Sequence[int], prompt: int) -> None:
    """Launches what steps of so many sequences, and a prompt of so many tokens, launch."""
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    for num_sequences in batches:
        _exercise(runner, num_sequences, 1)
    _exercise(runner, 1, prompt)


def _exercise(runner: ModelRunner, num_sequences: int, num_new: int) -> None:
    """Launches what a step of so many sequences, and so many tokens of each, launches. They share
    their blocks: what they compute means nothing."""
    table = list(range(1, 2 + num_new // runner.block_size))
    items = [
        ScheduledRequest(
            request_id=str(number), token_ids=[1] * num_new, num_computed_tokens=0,
            block_table=table, params=SamplingParams(temperature=0.0), seed=0,
            prompt_token_ids=[1] * num_new, output_token_ids=[], samples=True,
        )
        for number in range(num_sequences)
    ]  # fmt: skip
    with torch.inference_mode():
        hidden = runner.model.hidden_states(runner._batch(items), runner.caches)
        runner.model.logits(hidden[:num_sequences])
