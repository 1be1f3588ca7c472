"""The command line. ``ingle SUBCOMMAND --help`` lists every flag; ``docs/cli.md`` is made from it.

A subcommand is a plain function. Its parameters that are dataclasses (``EngineConfig``, the
server's ``ServerConfig`` ...) become one flag per field, so a new field is a new flag, environment
variable and YAML key at once. Other packages add subcommands through the entry point group
``ingle.commands``.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (``sys.argv`` when None) and gives the exit code."""
    if argv is None:
        from ingle.cli.restart import restart_with_settings

        restart_with_settings()
    from ingle.cli.app import run

    return run(argv)
