"""The runner's own duties: copying blocks and telling memory errors from others."""

from __future__ import annotations

import pytest
import torch

from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest, SchedulerOutput
from ingle.request import SamplingParams
from ingle.sampling.sampler import Sampler


class FailingModel:
    """A model whose step fails in a given way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def hidden_states(self, batch: object, caches: object) -> torch.Tensor:
        raise self.error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def one_token_plan() -> SchedulerOutput:
    share = ScheduledRequest(
        request_id="r",
        token_ids=[1],
        num_computed_tokens=0,
        block_table=[1],
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=[1],
        output_token_ids=[],
        samples=True,
    )
    return SchedulerOutput(scheduled=(share,))


def runner(error: Exception) -> ModelRunner:
    return ModelRunner(FailingModel(error), (), Sampler(()), 16, torch.device("cpu"))


def test_a_failed_cpu_allocation_is_a_memory_error() -> None:
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        real = error
    with pytest.raises(MemoryError):
        runner(real).execute(one_token_plan())


def test_a_cards_out_of_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        runner(torch.OutOfMemoryError("CUDA out of memory")).execute(one_token_plan())


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        runner(RuntimeError("wrong shape")).execute(one_token_plan())
