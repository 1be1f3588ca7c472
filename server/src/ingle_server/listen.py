"""The listening socket, taken before the model loads: a port in use must not cost a load."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

from ingle import IngleError
from ingle_server.config import ServerConfig

BACKLOG = 2048


class ListenError(IngleError):
    """The address to listen on cannot be had; the message names the option."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket that listens on the configured address. Connections wait until they are accepted.

    Raises:
        ListenError: When the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it. Without, head and body of an answer, or two events of a
        # stream, wait 40 ms for each other: asyncio sets it only where proto is IPPROTO_TCP.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(_explain(config, error)) from None
    sock.setblocking(False)
    return sock


def _explain(config: ServerConfig, error: OSError) -> str:
    where = f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return f"--port: {where} is in use by another program. Stop it, or choose another --port."
    if error.errno == errno.EACCES:
        return f"--port: not allowed to listen on {where}. Ports from 1024 up need no rights."
    return f"--host: cannot listen on {where}: {error.strerror or error}."


def check_certificate(config: ServerConfig) -> None:
    """Reads certificate and key once, so that a wrong file is told before the model loads.

    Raises:
        ListenError: Naming the options.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option, file in (
        ("--ssl-certfile", config.ssl_certfile),
        ("--ssl-keyfile", config.ssl_keyfile),
    ):
        if not Path(file).is_file():
            raise ListenError(f"{option}: {file} is no file.")
    try:
        # A key with a password would have the library ask for it on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None) or error.strerror or "they cannot be read"
        raise ListenError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} do not "
            f"serve: {reason}. Both must be PEM, belong together, and need no password."
        ) from None


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """The server's address as a client on this machine types it."""
    scheme = "https" if config.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{sock.getsockname()[1]}{config.root_path}"
