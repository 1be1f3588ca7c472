"""``ingle quantize``: makes a quant; the format's own options are flags too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingle.cli.flags import Command, make_command

if TYPE_CHECKING:
    from ingle.quantize.command import Quantized

_FORMAT = "--format"
_SUMMARY = """Make a quant of a dense model: block by block, resumed after an interruption.

    The format's own options are flags too: `ingle quantize --format NAME --help` lists them. A
    folder that holds an interrupted run is finished by the same command, to the same bytes.

    Args:
        model: A dense model: a folder or a hub id.
        out: The folder to write.
    """


def command_for(argv: Sequence[str]) -> Command:
    """The command with the flags of the format that ``argv`` names.

    Raises:
        ConfigError: When that format cannot be made.
        PluginError: When no plugin offers it.
    """
    named = _format_in(argv) or os.environ.get("INGLE_FORMAT", "")
    if not named:
        return make_command("quantize", _function(None))
    from ingle.quantize.command import find_format

    return make_command("quantize", _function(find_format(named).quantizer_options))


def _format_in(argv: Sequence[str]) -> str:
    for place, token in enumerate(argv):
        if token == _FORMAT and place + 1 < len(argv):
            return argv[place + 1]
        if token.startswith(f"{_FORMAT}="):
            return token.partition("=")[2]
    return ""


def _function(options: type[Any] | None) -> Callable[..., None]:
    """The function behind the command; its annotations decide the flags."""
    from ingle.quantize.config import CalibrationConfig, QuantizeConfig

    def run(model: str, out: Path, *, what: Any, calibration: Any, own: Any) -> None:
        from ingle.quantize.command import make_quant

        try:
            made = make_quant(model, out, what, calibration, own)
        except KeyboardInterrupt:
            print("ingle: interrupted; the same command goes on where it stopped.", file=sys.stderr)
            raise
        print(describe(made))

    def refuse(model: str, out: Path, *, what: Any, calibration: Any) -> None:
        from ingle.quantize.command import find_format

        find_format(what.format)

    function = refuse if options is None else run
    function.__doc__ = _SUMMARY
    hints = {"model": str, "out": Path, "what": QuantizeConfig, "calibration": CalibrationConfig}
    own = {} if options is None else {"own": options}
    function.__annotations__ = {**hints, **own, "return": None}
    return function


def describe(made: Quantized) -> str:
    """What was made, for people."""
    kl = "" if made.kl is None else f", KL {made.kl:.4f} from the original"
    card = f" and {made.peak_device_bytes / 1e9:.2f} GB on the card" * bool(made.peak_device_bytes)
    return (
        f"{made.path}: {made.format}, {made.bits_per_weight:.3f} bits per weight, "
        f"{made.total_bytes / 1e6:.1f} MB{kl}.\n"
        f"{made.seconds:.0f} s, at most {made.peak_memory_bytes / 1e9:.2f} GB of memory{card}."
    )
