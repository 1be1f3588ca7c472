"""Every error Ingle raises on purpose: what was wrong, the value seen, what to do."""

from __future__ import annotations


class IngleError(Exception):
    """Base of all errors raised on purpose by Ingle."""


class ConfigError(IngleError):
    """An option has a value that cannot work; the message names the option as the user types it."""


class CheckpointError(IngleError):
    """A model folder or one of its files cannot be used; the message names file and tensor."""


class PluginError(IngleError):
    """A plugin that was asked for failed, or plugins disagree; the message names the plugin."""


class CapacityError(IngleError):
    """The work does not fit: memory, cache blocks or queue length."""


class EngineDeadError(IngleError):
    """The engine thread has ended; every request in flight and every later one gets this."""


class RequestError(IngleError):
    """One request is wrong; nobody else's request is affected.

    Args:
        message: What was wrong, the value seen, what to do.
        param: The request field at fault, in the client's spelling, or None.
        code: OpenAI's string code (``context_length_exceeded`` …), or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
