"""One plugin while it is in use: what it gave, how far it got, and everything that failed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pluggy

from ingle.errors import PluginError
from ingle.registry.report import STAGES, PluginFailure, PluginReport, Stage, Status

T = TypeVar("T")

MAX_REASON = 400
LATE_STAGES: frozenset[Stage] = frozenset(("supports", "self_check", "warm_up"))
"""Stages after loading: there is no later moment at which to gather their failures, so strict
mode raises at once."""


@dataclass(slots=True, kw_only=True)
class PluginRecord:
    """A plugin's state. Mutable; ``report`` is the frozen picture of it.

    Attributes:
        hooks: The plugin's own manager, once it is registered: nobody else's failure is in it.
        strict: Whether a failure after loading raises.
        source: Path of the plugin's module file, empty when unknown.
    """

    name: str
    module: str
    distribution: str
    version: str
    builtin: bool = False
    strict: bool = False
    disabled: bool = False
    source: str = ""
    stage: Stage = "discover"
    hooks: pluggy.PluginManager | None = field(default=None, repr=False)
    failures: list[PluginFailure] = field(default_factory=list)
    weight_formats: dict[str, None] = field(default_factory=dict)
    matmul_kernels: dict[str, None] = field(default_factory=dict)
    kv_cache_formats: dict[str, None] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """``failed`` when anything failed."""
        if self.disabled:
            return "disabled"
        return "failed" if self.failures else "ok"

    @property
    def label(self) -> str:
        """Name and package, as messages show them."""
        return f"{self.name} ({self.distribution} {self.version})"

    def attempt(self, stage: Stage, action: Callable[[], T], item: str = "") -> T | None:
        """What ``action`` returns, or None when it raised: the failure is then on record.

        The one place where a plugin's exceptions are caught. ``SystemExit`` is among them: a
        module that calls ``sys.exit`` must not end the engine.

        Raises:
            PluginError: In strict mode, for the stages after loading.
        """
        self.reach(stage)
        try:
            return action()
        except (Exception, SystemExit) as error:
            failure = self.fail(stage, describe(error), item=item, error=error)
            if self.strict and stage in LATE_STAGES:
                raise PluginError(f"Plugin {self.label}: {failure.line}.") from error
            return None

    def reach(self, stage: Stage) -> None:
        """Notes that the plugin came as far as ``stage``."""
        if STAGES.index(stage) > STAGES.index(self.stage):
            self.stage = stage

    def fail(
        self, stage: Stage, reason: str, *, item: str = "", error: BaseException | None = None
    ) -> PluginFailure:
        """Puts a failure on record; the same one a second time changes nothing."""
        self.reach(stage)
        text = "" if error is None else own_traceback(error)
        failure = PluginFailure(stage=stage, item=item, reason=reason, traceback=text)
        if all(known.line != failure.line for known in self.failures):
            self.failures.append(failure)
        return failure

    def report(self) -> PluginReport:
        """The plugin as it stands."""
        return PluginReport(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            module=self.module,
            builtin=self.builtin,
            status=self.status,
            stage=self.stage,
            failures=tuple(self.failures),
            weight_formats=tuple(self.weight_formats),
            matmul_kernels=tuple(self.matmul_kernels),
            kv_cache_formats=tuple(self.kv_cache_formats),
        )


@dataclass(frozen=True, slots=True)
class Offer(Generic[T]):
    """A format or kernel together with the plugin that gave it."""

    item: T
    record: PluginRecord

    @property
    def plugin(self) -> str:
        """The plugin's name."""
        return self.record.name


def spelling(name: str) -> str:
    """A name with case and separators evened out, as pip does: ``AWQ_Marlin`` is ``awq-marlin``."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def describe(error: BaseException) -> str:
    """An exception in one line: its type (unless it is Ingle's own) and its message."""
    message = " ".join(str(error).split())
    kind = type(error).__name__
    text = message if isinstance(error, PluginError) else f"{kind}: {message}" if message else kind
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def own_traceback(error: BaseException) -> str:
    """The traceback from the plugin's side on, without the frame that caught it."""
    frames = error.__traceback__
    inner = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    return "".join(traceback.format_exception(type(error), error, inner))
