"""The server's options: one frozen dataclass, validated where it is built.

Field names are the command-line flags with dashes for underscores, spelled as vLLM and Aphrodite
spell them where they have the option.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from ingle import ConfigError
from ingle.config import parse_bytes

LogLevel = Literal["debug", "info", "warning", "error"]
ToolCallParserName = Literal["hermes", "qwen", "mistral", "llama3_json", "llama4_json", "json"]
ReasoningParserName = Literal["think", "qwen3", "deepseek_r1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, whom to let in, and the limits of a request.

    Attributes:
        host: Address to listen on. Anything but a loopback address is open to the network.
        port: Port to listen on; 0 takes a free one.
        api_key: Keys that clients must send as ``Authorization: Bearer KEY``; without any, every
            key (or none) is accepted.
        require_key: Refuse to start on an address that is open to the network without a key.
        served_model_name: Names that clients may ask for; the first one is listed first. Without
            any, it is the model's own name.
        tool_call_parser: How the model writes calls of functions: hermes, qwen, mistral,
            llama3_json, llama4_json or json. By default its chat template says so.
        reasoning_parser: Splits what the model thinks aloud into ``reasoning_content``: think,
            qwen3 or deepseek_r1. Off unless given.
        more_models: More models that may be swapped in, folders or hub ids; this is what a second,
            third … ``--model`` becomes.
        model_dir: A folder of model folders: each may be swapped in by its folder's name.
        allow_inline_model_loading: A request that names another of the models swaps it in; without
            this only ``POST /v1/model/load`` does.
        admin_key: Keys that may load and unload models, as ``X-Admin-Key: KEY`` or
            ``Authorization: Bearer KEY``; without any, nobody may.
        idle_unload: Seconds without a request after which the model's memory is given back; the
            next request loads it again. 0 never does.
        allowed_origins: Web origins that browsers may call from (CORS); none unless given.
        root_path: Path prefix under which a proxy publishes the server, such as ``/llm``.
        max_request_body: Largest request body (``16MiB`` or bytes); larger ones get 413.
        max_prompts: Prompts times ``n`` in one request at most.
        shutdown_timeout: Seconds that running requests may take to finish after SIGTERM.
        watchdog_seconds: Seconds a step of the engine may take before it counts as hung: health
            says 503, requests end with errors and the process exits with 1, so that a supervisor
            starts it anew. 0 waits for ever.
        timeout_keep_alive: Seconds an idle connection is kept open; longer than clients keep
            theirs, so that none is closed in the moment it is used again.
        header_timeout: Seconds a client may take to send a request's headers, or its body.
        sse_keep_alive: Seconds of silence in a stream after which a comment line is sent.
        ssl_keyfile: Private key file for HTTPS.
        ssl_certfile: Certificate file for HTTPS.
        log_level: What the server logs.
        disable_access_log: No log line per request.
    """

    host: str = "127.0.0.1"
    port: int = 2242
    api_key: tuple[str, ...] = ()
    require_key: bool = False
    served_model_name: tuple[str, ...] = ()
    tool_call_parser: ToolCallParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    more_models: tuple[str, ...] = ()
    model_dir: str | None = None
    allow_inline_model_loading: bool = False
    admin_key: tuple[str, ...] = ()
    idle_unload: float = 0.0
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_request_body: int | str = "16MiB"
    max_prompts: int = 1024
    shutdown_timeout: float = 8.0
    watchdog_seconds: float = 600.0
    timeout_keep_alive: float = 65.0
    header_timeout: float = 30.0
    sse_keep_alive: float = 15.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    log_level: LogLevel = "info"
    disable_access_log: bool = False

    def __post_init__(self) -> None:
        size = parse_bytes("--max-request-body", self.max_request_body)
        object.__setattr__(self, "max_request_body", size)
        _check_port(self.port)
        _check_keys("--api-key", self.api_key)
        _check_keys("--admin-key", self.admin_key)
        _check_root_path(self.root_path)
        for name in ("timeout_keep_alive", "header_timeout", "sse_keep_alive"):
            _check_seconds(name, getattr(self, name), zero=False)
        _check_seconds("shutdown_timeout", self.shutdown_timeout, zero=True)
        _check_seconds("idle_unload", self.idle_unload, zero=True)
        _check_seconds("watchdog_seconds", self.watchdog_seconds, zero=True)
        if self.max_prompts < 1:
            raise ConfigError(f"--max-prompts must be at least 1, got {self.max_prompts}.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together.")
        if self.require_key and not self.api_key and not self.is_loopback:
            raise ConfigError(
                f"--require-key: --host {self.host} is open to the network and no --api-key is "
                "given. Give one, or listen on 127.0.0.1."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def max_body_bytes(self) -> int:
        """``max_request_body`` in bytes."""
        return int(self.max_request_body)


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, IPv6 without brackets) is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {port}.")


def _check_keys(flag: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        # A key with a space or outside ASCII could never arrive in a header; say so at once.
        if not key or not key.isascii() or any(c.isspace() for c in key):
            raise ConfigError(
                f"{flag} must be non-empty ASCII without spaces; one of the given keys is not."
            )


def _check_root_path(path: str) -> None:
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ConfigError(f"--root-path must look like /prefix, got {path!r}.")


def _check_seconds(name: str, value: float, *, zero: bool) -> None:
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} must be a number of seconds above 0, got {value}.")
