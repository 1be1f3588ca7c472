"""What the operator reads once the server answers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ingle_server.listen import url_of
from ingle_server.service import Service


def ready_text(service: Service, sock: socket.socket, seconds: float) -> str:
    """Address, model, context, start-up time, memory, and a line to try.

    Args:
        seconds: From the command to now.
    """
    config = service.config
    url = url_of(config, sock)
    info = service.engine.info
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    path = "chat/completions" if info.has_chat_template else "completions"
    ask = (
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        if info.has_chat_template
        else '"prompt": "The capital of France is"'
    )
    names = ", ".join(service.names)
    others = [entry.name for entry in service.models.entries if entry.name not in service.names]
    more = f"May be loaded instead: {', '.join(others)}.\n" if others else ""
    report = f"{info.memory_report}\n" if info.memory_report else ""
    return (
        f"Ready: {url}/v1 serves {names} with a context of {info.max_model_len} tokens.\n"
        f"{more}"
        f"Started in {seconds:.1f} s{_memory()}.\n"
        f"{report}"
        f"Try: curl {url}/v1/{path}{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{service.names[0]}", {ask}}}\''
    )


def _memory() -> str:
    size = resident_bytes()
    return "" if size is None else f", resident memory {size / 2**20:,.0f} MiB"


def resident_bytes() -> int | None:
    """Bytes of memory this process holds, or None where the system does not say (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
