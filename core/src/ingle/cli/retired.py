"""Flags of vLLM and Aphrodite that Ingle accepts and does not need, with what replaces them.

Only flags whose absence changes no answer stand here. A flag that asks for a feature Ingle lacks is
an unknown flag: ignoring it would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """One retired flag.

    Attributes:
        note: What replaces it or why nothing has to, as the end of "--flag ...".
        takes_value: Whether a value follows it.
        becomes: The flag that takes over its value, or empty.
        only: The values that can be accepted; empty accepts all.
    """

    note: str
    takes_value: bool = False
    becomes: str = ""
    only: tuple[str, ...] = ()


def _switch(why: str) -> Retired:
    return Retired(note=f"is not needed: {why}")


def _valued(why: str, *only: str) -> Retired:
    return Retired(note=f"is not needed: {why}", takes_value=True, only=only)


def _renamed(flag: str, *, takes_value: bool = True) -> Retired:
    return Retired(note=f"is called {flag} here.", takes_value=takes_value, becomes=flag)


_RECOMPUTE: Final = "a preempted sequence is computed again; nothing is swapped to the host."
_CHUNKED: Final = "prompts are always computed in chunks of --max-num-batched-tokens."
_ONE_SCHEDULER: Final = "there is one scheduler, and every step returns its tokens."
_NO_RAY: Final = "the engine runs in one process; there are no workers."
_ONE_CARD: Final = "Ingle runs on one device."
_NO_REMOTE_CODE: Final = "is ignored: Ingle never runs code that comes with a model."
_REQUEST_LOG: Final = "a finished request is one line of figures in the log, never its text."
_GRAPHS: Final = "CUDA graphs are on unless --enforce-eager."
_ATTENTION: Final = "the attention backend follows from device and cache format."
_HASHES: Final = "prefix blocks are always found by chained SHA-256."

RETIRED: Final[Mapping[str, Retired]] = {
    "--async-scheduling": _switch(_ONE_SCHEDULER),
    "--attention-backend": _valued(_ATTENTION),
    "--block-allocator": _valued("there is one block manager."),
    "--compilation-config": _valued(_GRAPHS),
    "--context-shift": _switch("old tokens are never dropped silently."),
    "--data-parallel-size": _valued(_ONE_CARD, "1"),
    "--disable-custom-all-reduce": _switch(_ONE_CARD),
    "--disable-frontend-multiprocessing": _switch(_NO_RAY),
    "--disable-hybrid-kv-cache-manager": _switch("there is one block manager."),
    "--disable-log-requests": _switch(_REQUEST_LOG),
    "--disable-log-stats": _switch("--log-level warning silences the figures; /metrics has them."),
    "--disable-uvicorn-access-log": _renamed("--disable-access-log", takes_value=False),
    "--distributed-executor-backend": _valued(_NO_RAY),
    "--download-dir": _valued("set HF_HOME to choose where hub models are kept."),
    "--enable-chunked-prefill": _switch(_CHUNKED),
    "--enable-log-requests": _switch(_REQUEST_LOG),
    "--engine-use-ray": _switch(_NO_RAY),
    "--guided-decoding-backend": _valued("there is no backend to choose."),
    "--kv-cache-memory": _renamed("--kv-cache-memory-bytes"),
    "--launch-kobold-api": _switch("Kobold's API is always there, under /api/v1."),
    "--load-format": _valued("weights are always read from safetensors.", "auto", "safetensors"),
    "--long-prefill-token-threshold": _valued(_CHUNKED),
    "--max-context-len-to-capture": _valued(_GRAPHS),
    "--max-log-len": _valued(_REQUEST_LOG),
    "--max-long-partial-prefills": _valued(_CHUNKED),
    "--max-num-partial-prefills": _valued(_CHUNKED),
    "--max-paddings": _valued("batches are not padded."),
    "--max-parallel-loading-workers": _valued("weights are mapped, not copied by workers."),
    "--max-seq-len-to-capture": _valued(_GRAPHS),
    "--multi-step-stream-outputs": _switch(_ONE_SCHEDULER),
    "--num-lookahead-slots": _valued(_ONE_SCHEDULER),
    "--num-scheduler-steps": _valued(_ONE_SCHEDULER),
    "--pipeline-parallel-size": _valued(_ONE_CARD, "1"),
    "--preemption-mode": _valued(_RECOMPUTE),
    "--prefix-caching-hash-algo": _valued(_HASHES),
    "--ray-workers-use-nsight": _switch(_NO_RAY),
    "--scheduler-delay-factor": _valued(_ONE_SCHEDULER),
    "--scheduling-policy": _valued("requests are served first come, first served.", "fcfs"),
    "--swap-space": _valued(_RECOMPUTE),
    "--tensor-parallel-size": _valued(_ONE_CARD, "1"),
    "--tokenizer-mode": _valued("tokenizers are always the fast ones.", "auto", "hf"),
    "--trust-remote-code": Retired(note=_NO_REMOTE_CODE),
    "--use-tqdm-on-load": _switch("a terminal always gets a progress bar."),
    "--use-v2-block-manager": _switch("there is one block manager."),
    "--uvicorn-log-level": _renamed("--log-level"),
    "--uvloop": _switch("the server uses uvloop where it is installed."),
    "--worker-use-ray": _switch(_NO_RAY),
}

SHORT_RETIRED: Final[Mapping[str, str]] = {
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
}
