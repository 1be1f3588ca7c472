"""Flags of vLLM and Aphrodite that Ingle accepts and does not need, with what replaces them.

Only flags whose absence changes no answer stand here. Flags that ask for what Ingle lacks stand in
``lacking.py`` and are refused.
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

_ONE_RUNNER: Final = "one loaded model generates and gives embeddings."
_PLAIN: Final = "messages go into the template as texts."
_TEXT: Final = "the models read text only."

RETIRED: Final[Mapping[str, Retired]] = {
    "--async-scheduling": _switch(_ONE_SCHEDULER),
    "--attention-backend": _valued(_ATTENTION),
    "--additional-config": _valued("there is no other backend to pass it to."),
    "--api-server-count": _valued(_NO_RAY, "1"),
    "--block-allocator": _valued("there is one block manager."),
    "--chat-template-content-format": _valued(_PLAIN, "auto", "string"),
    "--chunk-size": _renamed("--max-num-batched-tokens"),
    "--compilation-config": _valued(_GRAPHS),
    "--config-format": _valued("config.json is what is read.", "auto", "hf"),
    "--convert": _valued(_ONE_RUNNER, "auto", "none"),
    "--context-shift": _switch("old tokens are never dropped silently."),
    "--cuda-graph-sizes": _valued(_GRAPHS),
    "--data-parallel-backend": _valued(_ONE_CARD),
    "--data-parallel-size": _valued(_ONE_CARD, "1"),
    "--disable-async-output-proc": _switch(_ONE_SCHEDULER),
    "--disable-cascade-attn": _switch(_ATTENTION),
    "--disable-chunked-mm-input": _switch(_CHUNKED),
    "--disable-custom-all-reduce": _switch(_ONE_CARD),
    "--disable-fastapi-docs": _switch("/openapi.json needs the key; there is no other page."),
    "--disable-frontend-multiprocessing": _switch(_NO_RAY),
    "--disable-hybrid-kv-cache-manager": _switch("there is one block manager."),
    "--disable-logprobs-during-spec-decoding": _switch("logprobs cost the same with guesses."),
    "--disable-mm-preprocessor-cache": _switch(_TEXT),
    "--disable-log-requests": _switch(_REQUEST_LOG),
    "--disable-log-stats": _switch("--log-level warning silences the figures; /metrics has them."),
    "--disable-uvicorn-access-log": _renamed("--disable-access-log", takes_value=False),
    "--distributed-executor-backend": _valued(_NO_RAY),
    "--download-dir": _valued("set HF_HOME to choose where hub models are kept."),
    "--enable-auto-tool-choice": _switch("tools are on when a request brings some."),
    "--enable-chunked-prefill": _switch(_CHUNKED),
    "--enable-log-requests": _switch(_REQUEST_LOG),
    "--enable-prompt-tokens-details": _switch("usage always tells cached tokens."),
    "--enable-reasoning": _switch("--reasoning-parser turns it on."),
    "--enable-request-id-headers": _switch("every answer has X-Request-Id."),
    "--enable-server-load-tracking": _switch("/load always tells."),
    "--enable-tokenizer-info-endpoint": _switch("/tokenize and /v1/models tell what there is."),
    "--engine-use-ray": _switch(_NO_RAY),
    "--exclude-tools-when-tool-choice-none": _switch("they are left out then."),
    "--fetch-requests": _switch(_REQUEST_LOG),
    "--guided-decoding-backend": _valued("there is no backend to choose."),
    "--guided-decoding-disable-any-whitespace": _switch("there is no runaway whitespace."),
    "--h11-max-header-count": _valued("256 headers are taken."),
    "--h11-max-incomplete-event-size": _valued("headers have a limit of their own."),
    "--hf-token": _valued("set HF_TOKEN."),
    "--ignore-patterns": _valued("only what is needed is fetched."),
    "--inline-model-loading": _renamed("--allow-inline-model-loading", takes_value=False),
    "--kv-cache-memory": _renamed("--kv-cache-memory-bytes"),
    "--launch-kobold-api": _switch("Kobold's API is on the same port."),
    "--load-format": _valued("weights are always read from safetensors.", "auto", "safetensors"),
    "--log-error-stack": _switch("the log has the stack of every fault."),
    "--logprobs-mode": _valued("logprobs are those of the model.", "raw_logprobs"),
    "--long-prefill-token-threshold": _valued(_CHUNKED),
    "--max-batch-size": _renamed("--max-num-seqs"),
    "--max-context-len-to-capture": _valued(_GRAPHS),
    "--max-log-len": _valued(_REQUEST_LOG),
    "--max-logprobs": _valued("20 may be asked for.", "20"),
    "--max-long-partial-prefills": _valued(_CHUNKED),
    "--max-num-partial-prefills": _valued(_CHUNKED),
    "--max-paddings": _valued("batches are not padded."),
    "--max-parallel-loading-workers": _valued("weights are mapped, not copied by workers."),
    "--max-seq-len": _renamed("--max-model-len"),
    "--max-seq-len-to-capture": _valued(_GRAPHS),
    "--mm-processor-cache-type": _valued(_TEXT),
    "--model-loader-extra-config": _valued("safetensors need none."),
    "--multi-step-stream-outputs": _switch(_ONE_SCHEDULER),
    "--num-lookahead-slots": _valued(_ONE_SCHEDULER),
    "--num-scheduler-steps": _valued(_ONE_SCHEDULER),
    "--pipeline-parallel-size": _valued(_ONE_CARD, "1"),
    "--preemption-mode": _valued(_RECOMPUTE),
    "--prefix-caching-hash-algo": _valued(_HASHES),
    "--pt-load-map-location": _valued("weights are always read from safetensors."),
    "--ray-workers-use-nsight": _switch(_NO_RAY),
    "--realtime-process-priority": _switch("the system decides."),
    "--response-role": _valued("an answer's role is assistant.", "assistant"),
    "--runner": _valued(_ONE_RUNNER, "auto", "generate"),
    "--safetensors-load-strategy": _valued("weights are mapped."),
    "--scheduler-delay-factor": _valued(_ONE_SCHEDULER),
    "--scheduling-policy": _valued("requests are served first come, first served.", "fcfs"),
    "--send-tracebacks": _switch("a client never gets one."),
    "--show-hidden-metrics-for-version": _valued("no metric is hidden."),
    "--skip-mm-profiling": _switch(_TEXT),
    "--stream-interval": _valued("tokens come as they are made.", "1"),
    "--structured-outputs-config": _valued("there is no backend to choose."),
    "--swap-space": _valued(_RECOMPUTE),
    "--task": _valued(_ONE_RUNNER, "auto", "generate"),
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
    "-O": "--compilation-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
}
