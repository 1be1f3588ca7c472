"""Compiling in the background: kernels from disk at once, else made while the engine is idle."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("ingle.engine")

LOOK_SECONDS = 1.0
"""How often a waiting compiler looks whether the engine is idle."""
IDLE_LOOKS = 3
"""Looks in a row that must find it idle before compiling begins: it takes both cores' time."""
LOWEST_PRIORITY = 19
LAST_SECONDS = 2.0
"""How long a compiler that is given up may take to clear its folder."""


class CompileJob(Protocol):
    """Something to compile.

    Attributes:
        title: What it is, for the log: ``decode kernels``.
        folder: Where its packages lie.
    """

    title: str
    folder: Path

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code is in use."""
        ...

    @property
    def num_missing(self) -> int:
        """Packages that are not on disk yet."""
        ...

    def use_packages(self) -> bool:
        """Takes the packages on disk into use; False when one is missing or not right here."""
        ...

    def missing(self) -> list[str]:
        """A command that builds the packages that are not on disk; empty when all are."""
        ...


class BackgroundCompiler:
    """Carries out jobs, one after the other.

    Args:
        jobs: In order.
    """

    def __init__(self, jobs: Sequence[CompileJob]) -> None:
        self.jobs = tuple(jobs)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether all that there is to compile is in use."""
        return not self._open_jobs()

    @property
    def num_missing(self) -> int:
        """Packages that are not on disk yet."""
        return sum(job.num_missing for job in self.jobs)

    def compile_now(self) -> None:
        """Compiles what is not yet, and takes it into use; where that cannot be, a line in the log
        says why, and things run as they are written."""
        for job in self._open_jobs():
            if not job.use_packages() and self._run(job, priority=0):
                job.use_packages()

    def start(self, is_idle: Callable[[], bool]) -> None:
        """Compiles in a process of its own as soon as the engine has nothing else to do."""
        if self._open_jobs():
            self._thread = threading.Thread(
                target=self._compile_when_idle, args=(is_idle,), name="ingle-compile", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Gives up compiling, if that is still going on."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _open_jobs(self) -> list[CompileJob]:
        return [job for job in self.jobs if not job.is_compiled]

    def _compile_when_idle(self, is_idle: Callable[[], bool]) -> None:
        for job in self._open_jobs():
            looks = 0
            while looks < IDLE_LOOKS:
                if self._stopped.wait(LOOK_SECONDS):
                    return
                looks = looks + 1 if is_idle() else 0
            logger.info("Compiling %s for this model's shape, once; some 30 s", job.title)
            if self._run(job, LOWEST_PRIORITY) and job.use_packages():
                logger.info("The %s are compiled from here on (%s)", job.title, job.folder)

    def _run(self, job: CompileJob, priority: int) -> bool:
        """Runs the compiler in a process of its own, to its end; False when it failed or was given
        up. ``priority`` is the process's nice value."""
        line = job.missing()
        if not line:  # all are there, and one of them is not right here
            return False
        try:
            process = begin(line, priority)
        except OSError as error:
            logger.warning("No compiled %s: %s", job.title, error)
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
            logger.warning("No compiled %s: %s", job.title, "".join(last) or "no reason given")
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
