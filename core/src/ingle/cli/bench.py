"""``ingle bench``: the speed of one model in this process, alone or beside other engines."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ingle.bench.plot import check_plot_path, svg_plot
from ingle.bench.process import age_seconds, memory_bytes
from ingle.bench.workload import Workload
from ingle.cli.demo_model import or_demo_model
from ingle.config import EngineConfig

if TYPE_CHECKING:
    from ingle.bench.peer import Peer
    from ingle.cli.session import Session


def bench(
    engine: EngineConfig,
    workload: Workload,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    plot: Annotated[str | None, Parameter(negative=())] = None,
    compare: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    compare_model: Annotated[str | None, Parameter(negative=())] = None,
) -> None:
    """Measure a model's speed: decode by batch size, prefill, time to first token, start, memory.

    Tokens a second, median of the repeats with the lowest and highest beside it. Decode kernels are
    compiled first, as a server does once it is idle; --enforce-eager measures without them.
    Nothing is guessed ahead unless --speculative-model asks for it.

    With --compare another engine is measured in the same turns, and is stopped while it is not its
    turn; ratios are of the pairs, above 1 where Ingle is faster.

    Args:
        json: Print JSON instead of a table.
        plot: A file to draw the figures in, `.svg`.
        compare: Another engine: `llama.cpp=PATH`, the folder of llama-bench and llama-server, or
            `vllm=PYTHON`, the interpreter that has vllm. May be given twice.
        compare_model: For llama.cpp, the same weights as a GGUF file, where the model's folder
            holds none.
    """
    from ingle.bench.measure import Measurer
    from ingle.bench.peer import parse_compare
    from ingle.bench.report import to_json, to_text
    from ingle.bench.run import Run
    from ingle.cli.session import Session

    check_plot_path(plot)
    paths = parse_compare(compare)
    session = Session.open(or_demo_model(_plain(engine)))
    core = session.core
    times = {"startup_seconds": age_seconds()}
    measurer = Measurer(core)
    measurer.first_token(measurer.prompt(min(8, core.info.max_model_len - 1)))
    times["startup_to_first_token_seconds"] = age_seconds()
    for compiler in core.compilers:
        compiler.compile_now()
    with contextlib.ExitStack() as stack:
        peers = _peers(paths, session, workload, compare_model, stack)
        startup = {peer.name: peer.start() for peer in peers}
        most = core.scheduler.limits.max_num_seqs
        run = Run(measurer, peers, workload, core.info.max_model_len, most)
        result = dataclasses.replace(run.result(), startup=startup)
    setting = {**_setting(session, workload), **times, **_memory(session)}
    if plot is not None:
        Path(plot).write_text(svg_plot(result, core.info.model), encoding="utf-8")
    report = {**setting, **to_json(result)}
    print(json_module.dumps(report, indent=2) if json else to_text(setting, result))


def _plain(engine: EngineConfig) -> EngineConfig:
    """The options, without the speculation that single-user mode brings by itself."""
    if engine.speculative_model != "auto":
        return engine
    return dataclasses.replace(engine, speculative_model="none")


def _peers(
    paths: dict[str, Path],
    session: Session,
    workload: Workload,
    model: str | None,
    stack: contextlib.ExitStack,
) -> Sequence[Peer]:
    """The engines to compare with; ``stack`` ends them and removes what they wrote."""
    import torch

    from ingle.bench.llama_cpp import LlamaCpp, LlamaSetting, find_gguf
    from ingle.bench.vllm_peer import VLLM, VLLMSetting

    info, peers = session.core.info, []
    context = max(workload.prompt_tokens + workload.output_tokens, workload.prefill_tokens) + 16
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ingle-bench-")))
    for name, path in paths.items():
        peer: Peer
        if name == "llama.cpp":
            setting = LlamaSetting(
                folder=path,
                gguf=find_gguf(Path(info.model_path), model),
                threads=torch.get_num_threads(),
                streams=max(workload.batches),
                context=context,
                log=folder / "llama.log",
            )
            peer = LlamaCpp(setting)
        else:
            log = folder / "vllm.log"
            peer = VLLM(
                VLLMSetting(
                    python=path, model=info.model_path, dtype=info.dtype, context=context, log=log
                )
            )
        stack.callback(peer.close)
        peers.append(peer)
    return peers


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
        "load_seconds": info.load_seconds,
    }


def _memory(session: Session) -> dict[str, Any]:
    """What the process holds now and held at most, on a card what torch held there at most; and
    the plan's line."""
    import torch

    found = {f"{name}_memory_bytes": size for name, size in memory_bytes().items()}
    if session.core.info.device.startswith("cuda"):
        found["peak_card_memory_bytes"] = torch.cuda.max_memory_allocated()
    return {**found, "memory_plan": session.core.info.memory_report}
