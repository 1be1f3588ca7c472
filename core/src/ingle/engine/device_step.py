"""A decode step that draws its own tokens, as who runs ahead of the host sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingle.request import SamplingParams
from ingle.sampling.pipeline import stages_for
from ingle.sampling.stages import Temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """A sequence as it stands before the step.

    Attributes:
        token_id: Its last token, whose keys and values are not in the cache yet.
        position: That token's position.
        block_table: Its blocks.
        params: How to sample; ``draws_on_device`` holds for them.
        seed: The sequence's seed.
        num_output: Tokens generated so far, ``token_id`` included when it was.
    """

    token_id: int
    position: int
    block_table: Sequence[int]
    params: SamplingParams
    seed: int
    num_output: int


class DeviceStep(Protocol):
    """A decode step that draws and feeds back its own tokens; ``GraphStep`` is one."""

    num_rows: int

    def place(self, row: int, start: RowStart) -> None:
        """Puts a sequence into ``row``, from the next step on."""
        ...

    def clear(self, row: int) -> None:
        """Takes a sequence out."""
        ...

    def set_blocks(self, row: int, block_table: Sequence[int]) -> None:
        """Says which blocks a row has; before the step that needs a new one."""
        ...

    def run(self) -> int:
        """Enqueues a step and returns its number."""
        ...

    def tokens(self, step: int) -> list[int]:
        """What the rows drew, waiting for that step; -1 where logits were not finite."""
        ...


def draws_on_device(params: SamplingParams, eos_token_ids: Sequence[int]) -> bool:
    """Whether a request's tokens can be drawn inside the graph: greedy, or by temperature alone.
    Others need the host between two steps."""
    wants = (params.structured, params.logprobs, params.prompt_logprobs, params.pooling)
    if any(want is not None for want in wants) or params.mirostat_mode or params.banned_strings:
        return False
    stages = stages_for(params, eos_token_ids)
    return all(isinstance(stage, Temperature) for stage in stages)
