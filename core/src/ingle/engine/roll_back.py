"""Sends a sequence back to earlier tokens: what that means for queues, blocks and guesses.

No torch here.
"""

from __future__ import annotations

from ingle.engine.scheduler import Scheduler
from ingle.engine.sequence import Sequence, SequenceStatus


def roll_back(scheduler: Scheduler, sequence: Sequence, num_output: int, token_id: int) -> None:
    """Sends a sequence back to its first ``num_output`` output tokens, without ``token_id``
    behind them. One that has just ended lives again.

    It gives up its blocks like a preempted one, and finds in the prefix cache what it keeps.
    Without that cache nobody shares its blocks, and it writes over them.
    """
    blocks, had_ended = scheduler.blocks, sequence.finished
    stays = sequence.status is SequenceStatus.RUNNING and not blocks.enable_prefix_caching
    if not stays:
        scheduler.revive(sequence)  # indexes its blocks under the tokens they hold
    sequence.roll_back(num_output, token_id)
    del sequence.block_digests[sequence.num_tokens // blocks.block_size :]
    if stays:
        last = sequence.num_tokens - 1
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, last)
    if scheduler.speculation is not None and sequence.drafter is not None:
        if not had_ended:
            sequence.drafter.close()
        sequence.drafter = scheduler.speculation.drafter()
