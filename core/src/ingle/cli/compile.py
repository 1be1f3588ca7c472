"""``ingle compile``: what is compiled once per model and machine, before it is needed."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ingle.cli.demo_model import or_demo_model
from ingle.config import EngineConfig
from ingle.errors import ConfigError

if TYPE_CHECKING:
    from ingle.cli.session import Session

BATCHES = (1, 2, 4, 8, 9, 16, 17, 32)
"""Sequences decoded together: on a card, every tile of rows that its kernels are compiled for, and
every split of attention that follows from them."""
PROMPT_TOKENS = 40
"""More rows than kernels for few rows take, so that the path of prompts is compiled too."""


def compile_kernels(
    engine: EngineConfig,
    *,
    card: str | None = None,
    every_launch: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compile a model's kernels now, so that no server waits for them; the results stay on disk.

    On a CPU these are the decode kernels of the model's shape (and of --speculative-model's); on a
    card, all that loading and decoding with up to --max-num-seqs sequences compiles, and how each
    kind of weight and attention is launched fastest is measured and kept for later starts. Running
    it again compiles nothing. Useful while a container is built; --card does it without the card,
    for what can be done without.

    Args:
        card: Compile for a card that is not here, such as "RTX 4090" or sm_89:128 (architecture,
            multiprocessors): what the model's engine launches there. Needs triton and no driver.
        every_launch: With --card, also compile each launch that measuring on the card tries, so
            that it need not wait for the compiler there. Takes many times as long.
        json: Print JSON instead of a line.
    """
    if card is not None:
        report = _compile_for(engine, card, every_launch)
        print(json_module.dumps(report, indent=2) if json else _card_line(report))
        return
    if every_launch:
        raise ConfigError("--every-launch is for --card: on a card here every launch is measured.")
    from ingle.cli.session import Session

    begun = time.perf_counter()
    session = Session.open(or_demo_model(engine))
    loaded = time.perf_counter()
    report = _compile(session, engine.device)
    report |= {
        "model": session.core.info.model,
        "device": session.core.info.device,
        "load_seconds": loaded - begun,
        "compile_seconds": time.perf_counter() - loaded,
    }
    print(json_module.dumps(report, indent=2) if json else _line(report))


def _compile(session: Session, device: str) -> dict[str, Any]:
    core = session.core
    report: dict[str, Any] = {}
    compilers = core.compilers
    missing = sum(compiler.num_missing for compiler in compilers)
    for compiler in compilers:
        compiler.compile_now()
    if core.info.device.startswith("cuda"):
        from ingle.bench.measure import Measurer
        from ingle.engine.device import choose_device
        from ingle.engine.launch_tuning import tune_launches

        measurer = Measurer(core)
        most = core.scheduler.limits.max_num_seqs
        report["tuned"] = tune_launches(core, choose_device(device))
        for batch in (size for size in BATCHES if size <= most):
            measurer.decode(batch, PROMPT_TOKENS, 2)
    return report | {
        "num_kernels": missing,
        "is_compiled": bool(compilers) and all(one.is_compiled for one in compilers),
    }


def _compile_for(engine: EngineConfig, card: str, every_launch: bool) -> dict[str, Any]:
    """For a card that is not here; Triton keeps the results, in ``$TRITON_CACHE_DIR``.

    Raises:
        ConfigError: When triton is missing, or the card is not known.
    """
    if find_spec("triton") is None:
        raise ConfigError("--card needs triton: pip install 'ingle[triton]'.")
    from ingle.engine.absent_card import Exercise, compile_for, find_card

    config, known = or_demo_model(engine), find_card(card)
    batches = [size for size in BATCHES if size <= config.max_running]
    exercise = Exercise(batches=batches, prompt=PROMPT_TOKENS, every_launch=every_launch)
    found = compile_for(config, known, exercise)
    return {"model": config.model, "card": known.name, **asdict(found)}


def _card_line(report: dict[str, Any]) -> str:
    return (
        f"{report['num_compiled']} kernels compiled for {report['card']} in "
        f"{report['seconds']:.1f} s; {report['num_found']} were there."
    )


def _line(report: dict[str, Any]) -> str:
    seconds = report["compile_seconds"]
    if report["device"].startswith("cuda"):
        tuned = len(report["tuned"])
        return (
            f"{tuned} kinds of launches were measured, and decoding with every batch size was "
            f"tried once, in {seconds:.1f} s. The next start launches as was measured."
        )
    if not report["is_compiled"]:
        return "Nothing is compiled for this model: its steps run as they are."
    return f"{report['num_kernels']} kernels compiled in {seconds:.1f} s; the others were there."
