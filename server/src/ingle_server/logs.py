"""What is logged, and how it looks: one line to stderr, without uvicorn's own story."""

from __future__ import annotations

from typing import Any

from ingle_server.config import LogLevel


def log_config(level: LogLevel) -> dict[str, Any]:
    """For ``logging.config.dictConfig``: Ingle and the access log at ``level``; of uvicorn, only
    what goes wrong, unless ``level`` is ``debug``."""
    shown = level.upper()
    uvicorn_level = shown if level in ("debug", "error") else "WARNING"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(levelname)s %(message)s", "datefmt": "%H:%M:%S"}
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "stream": "ext://sys.stderr",
            }
        },
        "loggers": {
            "ingle": {"handlers": ["stderr"], "level": shown, "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": uvicorn_level, "propagate": False},
            "uvicorn.error": {"level": uvicorn_level},
            "uvicorn.access": {"level": shown},
        },
    }
