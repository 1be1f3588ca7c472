"""Which attention a model gets, and the reason that is logged when it is not the fastest."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from ingle.attention.gathered import GatheredAttention
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.attention.reference import ReferenceAttention
from ingle.builtin.kv_native import NativeKVCache
from ingle.engine import attention_choice
from ingle.engine.attention_choice import AttentionNeeds, choose_attention
from ingle.plugin import DeviceInfo, KVCacheGeometry


def needs(head_dim: int = 64, block_size: int = 16, **changes: object) -> AttentionNeeds:
    sides = (
        KVCacheGeometry(
            side=side,
            num_kv_heads=2,
            head_dim=head_dim,
            block_size=block_size,
            dtype=torch.float16,
        )
        for side in ("k", "v")
    )
    form = NativeKVCache()
    k, v = sides
    given = AttentionNeeds(
        device=DeviceInfo(type="cuda", capability=(8, 9)),
        dtype=torch.float16,
        num_heads=8,
        geometry=(k, v),
        formats=(form, form),
        scale=head_dim**-0.5,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def test_a_cpu_gets_its_own_attention() -> None:
    maker = choose_attention(needs(device=DeviceInfo(type="cpu")))
    assert isinstance(maker(None), PagedCPUAttention)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (needs(head_dim=72), "head size 72"),
        (needs(block_size=48), "--block-size 48"),
        (needs(num_heads=512), "256 query heads"),
        (needs(dtype=torch.float32), "torch.float32"),
        (needs(device=DeviceInfo(type="cuda", capability=(7, 5))), "(7, 5)"),
    ],
)
def test_what_the_kernel_cannot_serve_is_gathered_and_said(
    case: AttentionNeeds, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ingle.engine"):
        maker = choose_attention(case)
    assert isinstance(maker(None), GatheredAttention)
    assert why in caplog.text


def test_a_soft_capped_model_that_the_kernel_cannot_serve_gets_the_reference() -> None:
    maker = choose_attention(needs(softcap=50.0, dtype=torch.float32))
    assert isinstance(maker(None), ReferenceAttention)


def test_without_triton_it_is_gathered_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "ingle.engine"):
        maker = choose_attention(needs())
    assert isinstance(maker(None), GatheredAttention)
    assert "triton is not installed" in caplog.text
