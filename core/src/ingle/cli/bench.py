"""``ingle bench``: the speed of one model at batch 1, in this process."""

from __future__ import annotations

import dataclasses
import json as json_module
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ingle.cli.demo_model import or_demo_model
from ingle.config import EngineConfig
from ingle.errors import ConfigError
from ingle.request import SamplingParams

if TYPE_CHECKING:
    from ingle.cli.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured.

    Attributes:
        prompt_tokens: Tokens of each prompt; they are random, and differ between repeats.
        output_tokens: Tokens generated after each prompt.
        repeats: Measurements, after one that is thrown away.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("repeats", 1)):
            value = getattr(self, name)
            if value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {least}, got {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One prompt's times, in seconds from its start to its first and to its last token."""

    first_token: float
    last_token: float


def bench(
    engine: EngineConfig,
    workload: Workload,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Measure prefill and decode speed of one sequence, tokens a second, median of the repeats.

    Decode kernels are compiled first, as a server does once it is idle; --enforce-eager measures
    without them. Nothing is guessed ahead unless --speculative-model asks for it.

    Args:
        json: Print JSON instead of a table.
    """
    from ingle.cli.session import Session

    session = Session.open(or_demo_model(_plain(engine)))
    if session.core.compiler is not None:
        session.core.compiler.compile_now()
    # Random prompts never meet the prefix cache, so it stays as the user wants it.
    draw = random.Random(0)
    timings = [_measure(session, workload, draw) for _ in range(workload.repeats + 1)][1:]
    report = {**_setting(session, workload), **summarise(timings, workload)}
    print(json_module.dumps(report, indent=2) if json else _table(report))


def _plain(engine: EngineConfig) -> EngineConfig:
    """The options, without the speculation that single-user mode brings by itself."""
    if engine.speculative_model != "auto":
        return engine
    return dataclasses.replace(engine, speculative_model="none")


def _measure(session: Session, workload: Workload, draw: random.Random) -> Timing:
    vocab_size = session.core.info.vocab_size
    token_ids = [draw.randrange(vocab_size) for _ in range(workload.prompt_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = session.stream(token_ids, params)
    stamps = [time.perf_counter() - start for output in outputs if output.token_ids]
    return Timing(first_token=stamps[0], last_token=stamps[-1])


def summarise(timings: Sequence[Timing], workload: Workload) -> dict[str, float]:
    """Medians, and the lowest and highest measurement beside each."""
    figures = {
        "prefill_tokens_per_second": [workload.prompt_tokens / t.first_token for t in timings],
        "decode_tokens_per_second": [
            (workload.output_tokens - 1) / (t.last_token - t.first_token) for t in timings
        ],
        "time_to_first_token_seconds": [t.first_token for t in timings],
    }
    report: dict[str, float] = {}
    for name, values in figures.items():
        report[name] = statistics.median(values)
        report[f"{name}_min"] = min(values)
        report[f"{name}_max"] = max(values)
    return report


def _setting(session: Session, workload: Workload) -> dict[str, Any]:
    import torch

    info = session.core.info
    return {
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "threads": torch.get_num_threads(),
        **dataclasses.asdict(workload),
    }


def _table(report: dict[str, Any]) -> str:
    lines = []
    for name, value in report.items():
        if name.endswith(("_min", "_max")):
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if f"{name}_min" in report:
            shown += f"  ({report[f'{name}_min']:.4g} to {report[f'{name}_max']:.4g})"
        lines.append(f"{name.replace('_', ' '):30} {shown}")
    return "\n".join(lines)
