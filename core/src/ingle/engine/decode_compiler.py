"""Compiled decode steps for a running engine: from disk at once, else made while it is idle."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ingle.engine.model_runner import ModelRunner
from ingle.model.compiled_decoder import (
    MAX_EXTRA_BYTES,
    CompiledDecoder,
    Segments,
    SegmentShapes,
    extra_bytes,
    segment_shapes,
    segment_weights,
)
from ingle.model.decoder import Decoder
from ingle.model.segment_cache import cache_sides
from ingle.model.segment_package import command, load_package, package_path
from ingle.model.segment_shape import Shape
from ingle.plugin.device import DeviceInfo
from ingle.registry.loader import default_cache_folder

logger = logging.getLogger("ingle.engine")

LOOK_SECONDS = 1.0
"""How often a waiting compiler looks whether the engine is idle."""
IDLE_LOOKS = 3
"""Looks in a row that must find it idle before compiling begins: it takes both cores' time."""
LOWEST_PRIORITY = 19
LAST_SECONDS = 2.0
"""How long a compiler that is given up may take to clear its folder."""


class DecodeCompiler:
    """Puts compiled segments under a runner.

    Args:
        runner: Runs ``model``.
        model: The decoder as it was loaded.
        shapes: What to compile for it.
        folder: Where packages are kept.
        in_place: Whether ``shapes`` are of the cache as it is stored.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Decoder,
        shapes: SegmentShapes,
        folder: Path,
        *,
        in_place: bool = True,
    ) -> None:
        self._runner = runner
        self._model = model
        self._in_place = in_place
        self._wanted = tuple(
            (package_path(folder, shape), shape)
            for shape in (shapes.entry, shapes.layer, shapes.last, shapes.head)
        )
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether single-token steps run through compiled segments."""
        return isinstance(self._runner.model, CompiledDecoder)

    def use_packages(self) -> bool:
        """Takes the packages on disk into use; False when one is missing or not right here."""
        if not all(path.is_file() for path, _ in self._wanted):
            return False
        weights = segment_weights(self._model)
        tried = (weights.entry, weights.layers[0], weights.layers[-1], weights.head)
        entry, layer, end, head = (
            load_package(path, shape, tensors)
            for (path, shape), tensors in zip(self._wanted, tried, strict=True)
        )
        if entry is None or layer is None or end is None or head is None:
            return False
        segments = Segments(entry=entry, layer=layer, last=end, head=head)
        self._runner.model = CompiledDecoder(
            self._model, segments, weights, in_place=self._in_place
        )
        return True

    def compile_now(self) -> None:
        """Compiles, unless that is done, and takes the result into use; where that cannot be, a
        line in the log says why, and steps stay eager."""
        if not self.is_compiled and not self.use_packages() and self._run(priority=0):
            self.use_packages()

    def start(self, is_idle: Callable[[], bool]) -> None:
        """Compiles in a process of its own as soon as the engine has nothing else to do."""
        if not self.is_compiled:
            self._thread = threading.Thread(
                target=self._compile_when_idle, args=(is_idle,), name="ingle-compile", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Gives up compiling, if that is still going on."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _compile_when_idle(self, is_idle: Callable[[], bool]) -> None:
        looks = 0
        while looks < IDLE_LOOKS:
            if self._stopped.wait(LOOK_SECONDS):
                return
            looks = looks + 1 if is_idle() else 0
        logger.info("Compiling decode kernels for this model's shape, once; some 30 s")
        if self._run(LOWEST_PRIORITY) and self.use_packages():
            logger.info("Decode steps are compiled from here on (%s)", self._wanted[0][0].parent)

    def _missing(self) -> list[tuple[Path, Shape]]:
        return [(path, shape) for path, shape in self._wanted if not path.is_file()]

    def _run(self, priority: int) -> bool:
        """Runs the compiler in a process of its own, to its end; False when it failed or was given
        up. ``priority`` is the process's nice value."""
        try:
            process = begin(command(self._missing()), priority)
        except OSError as error:
            logger.warning("Decode steps stay uncompiled: %s", error)
            return False
        while True:
            try:
                _, errors = process.communicate(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                if self._stopped.is_set():
                    end_group(process)
                    return False
            else:
                break
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            logger.warning("Decode steps stay uncompiled: %s", "".join(last) or "no reason given")
        return process.returncode == 0


def begin(line: list[str], priority: int) -> subprocess.Popen[bytes]:
    """Starts a command at a nice value.

    Raises:
        OSError: When the system starts no process.
    """
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A group of its own: Ctrl-C in the terminal is the server's business, and giving up must
        # reach g++ too.
        process_group=0,
    )
    with contextlib.suppress(ProcessLookupError):  # it may have ended already
        os.setpriority(os.PRIO_PROCESS, process.pid, priority)
    return process


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children; it may remove what it has begun, for a moment."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=LAST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def decode_compiler(
    runner: ModelRunner, model: Decoder, device: DeviceInfo
) -> DecodeCompiler | None:
    """A compiler for a loaded model, its package in use when there is one on disk; None where
    there is nothing to gain: on a card, or for weights that segments do not know."""
    is_served = device.type == "cpu" and model.embedding.dtype is torch.bfloat16
    if not is_served:
        return None
    sides = cache_sides(runner.caches)
    shapes = segment_shapes(model, runner.block_size, sides)
    if shapes is None or extra_bytes(model) > MAX_EXTRA_BYTES:
        return None
    compiler = DecodeCompiler(
        runner, model, shapes, default_cache_folder(), in_place=sides is not None
    )
    compiler.use_packages()
    return compiler
