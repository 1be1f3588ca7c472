"""The repairs of Triton's interpreter do what they say."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _multiply_add(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b + a)


@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _sum(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)).to(tl.float32), 0))


@triton.jit
def _masked_by_scalar(x, out, limit, N: tl.constexpr):
    i = tl.arange(0, N)
    level = tl.load(limit)
    tl.store(out + i, tl.load(x + i, mask=(i < 5) & (level > 3), other=0.0))


@triton.jit
def _store_at(out, STEP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.program_id(0) * STEP + i, tl.zeros((N,), tl.float32))


def test_bfloat16_arithmetic_is_rounded_to_nearest() -> None:
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty_like(x)
    _multiply_add[(1,)](x, y, out, 64)
    assert torch.equal(out, x * y + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_and_saturate_as_the_card_does(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(63) * 4, torch.tensor([7.92])])
    out = torch.empty(64, dtype=dtype)
    _cast[(1,)](x, out, 64)
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.empty(64)
    _cast[(1,)](out, back, 64)
    assert torch.equal(back, out.float())


def test_a_bfloat16_sum_is_a_sum_of_numbers() -> None:
    x, out = torch.randn(64).bfloat16(), torch.empty(1)
    _sum[(1,)](x, out, 64)
    assert torch.allclose(out[0], x.float().sum(), atol=1e-5)


def test_a_mask_may_come_from_a_scalar() -> None:
    x, out = torch.ones(8), torch.empty(8)
    for level, count in ((4, 5), (2, 0)):
        _masked_by_scalar[(1,)](x, out, torch.tensor([level], dtype=torch.int32), 8)
        assert out.sum() == count


def test_a_stray_address_is_reported() -> None:
    with pytest.raises(InterpreterError, match="out of bounds"):
        _store_at[(1,)](torch.empty(7), 0, 8)


def test_two_programs_storing_to_one_address_are_reported() -> None:
    with pytest.raises(InterpreterError, match="same address"):
        _store_at[(2,)](torch.empty(16), 4, 8)
    _store_at[(2,)](torch.empty(16), 8, 8)
