"""vLLM beside Ingle, in a process of its own interpreter, stopped while it is not measured."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingle.bench.peer import PausedProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSetting:
    """How vLLM is run.

    Attributes:
        python: The interpreter that has it.
        model: The model's folder.
        dtype: Activation dtype.
        context: Tokens of a sequence at most.
        log: File for its messages.
    """

    python: Path
    model: str
    dtype: str
    context: int
    log: Path


class VLLM:
    """vLLM as a ``Peer``."""

    name = "vllm"

    def __init__(self, setting: VLLMSetting) -> None:
        self._setting = setting
        self._process: PausedProcess | None = None

    def start(self) -> float:
        """Loads the model."""
        setting = self._setting
        worker = Path(__file__).with_name("vllm_worker.py")
        # On a CPU vLLM would take 4 GiB for its cache, whatever is free.
        line = ["/usr/bin/env", "VLLM_CPU_KVCACHE_SPACE=2", str(setting.python), str(worker)]
        line += [setting.model, setting.dtype]
        begun = time.perf_counter()
        self._process = PausedProcess(
            [*line, str(setting.context)], "vllm", setting.log, talks=True
        )
        self._answer()
        return time.perf_counter() - begun

    def decode(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Tokens a second, all sequences together."""
        return self._ask(batch=batch, num_prompt=num_prompt, num_output=num_output)

    def prefill(self, num_tokens: int) -> float:
        """Tokens a second."""
        return self._ask(batch=1, num_prompt=num_tokens, num_output=1)

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.close()

    def _ask(self, **question: int) -> float:
        assert self._process is not None
        stdin = self._process.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(question).encode() + b"\n")
        stdin.flush()
        return float(self._answer()["tokens_per_second"])

    def _answer(self) -> dict[str, Any]:
        """Its next line that is an answer; other lines are its own talk."""
        assert self._process is not None
        with self._process as running:
            assert running.process.stdout is not None
            for line in running.process.stdout:
                if line.startswith(b"ANSWER "):
                    answer: dict[str, Any] = json.loads(line[len(b"ANSWER ") :])
                    return answer
            running.process.wait()
            raise running.failed()
