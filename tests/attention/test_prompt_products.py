"""A prompt's attention as two products, against the textbook in float64."""

from __future__ import annotations

import pytest
import torch

from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.attention.prompt_products import MAX_KEYS, PromptProducts, weights_of

SCALE = 0.2


def draw(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def textbook(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = query.double() @ key.double().transpose(2, 3) * SCALE
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ value.double(), logits.logsumexp(-1)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(64, 64, True), (320, 320, True), (40, 192, False)]
)
def test_output_and_log_sum_exps_are_the_textbooks(
    groups: int, rows: int, keys: int, causal: bool
) -> None:
    query = draw(2, groups, rows, 80, seed=0)
    key, value = (draw(2, 1, keys, 80, seed=s).expand(-1, groups, -1, -1) for s in (1, 2))
    found, sums = PromptProducts(SCALE)(query, key, value, causal=causal)
    wanted, wanted_sums = textbook(query, key, value, causal=causal)
    assert found.dtype is torch.bfloat16
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 2.5e-3  # rounding the output alone: 1.7e-3
    assert torch.allclose(sums.double(), wanted_sums, atol=1e-5, rtol=0)


def test_it_serves_prompts_in_bfloat16_once_it_is_compiled() -> None:
    products = PromptProducts(SCALE)
    query, key = draw(2, 3, 64, 80, seed=0), draw(2, 3, 64, 80, seed=1)
    assert not products.serves(query, key)
    products.function.use(lambda tensors: weights_of(*tensors))
    assert products.serves(query, key)
    assert not products.serves(query.float(), key.float())
    assert not products.serves(query[:, :, :8], key)
    assert not products.serves(query, key[:, :, :63])
    assert not products.serves(query, draw(2, 3, MAX_KEYS + 64, 80, seed=1))


def test_a_prompt_comes_out_the_same_either_way() -> None:
    attention = PagedCPUAttention(SCALE)
    query, key, value = draw(200, 6, 80, seed=0), draw(2, 264, 80, seed=1), draw(2, 264, 80, seed=2)
    flash = attention._prefill(query, key, value, 64)
    calls = []

    def run(tensors: list[torch.Tensor]) -> None:
        calls.append(tensors[0].shape)
        weights_of(*tensors)

    attention.products.function.use(run)
    found = attention._prefill(query, key, value, 64)
    assert calls
    assert (found.double() - flash.double()).norm() / flash.double().norm() < 6e-3
