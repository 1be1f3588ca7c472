"""Every inline-assembly string does what the kernel's plain arithmetic does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_emulator import run_ptx

from ingle.builtin.affine_triton import NIBBLE_ASM_BF16, NIBBLE_ASM_FP16
from ingle.builtin.kv_int_triton import INT8_ASM
from ingle_kv_fp8.triton_io import E4M3_ASM
from ingle_quant_exl2.kernel import FIELD_ASM
from ingle_quant_exl2.planes import PLANES


def random_registers(count: int = 4096) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)


def halves(registers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(registers).view(np.uint16).astype(np.int64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("j", range(4))
def test_a_nibble_minus_its_zero_is_exact(j: int, dtype: torch.dtype) -> None:
    words = random_registers()
    nibble = (halves(words) >> (4 * j)) & 15
    code = (NIBBLE_ASM_FP16 if dtype == torch.float16 else NIBBLE_ASM_BF16).value[j]
    for zero in range(17):
        bias = -128.0 if dtype == torch.bfloat16 else (64.0 if j % 2 else 1024.0)
        biased = bias + zero if bias > 0 else bias - zero
        pair = torch.full((2 * len(words),), biased, dtype=dtype).view(torch.int16).numpy()
        (out,) = run_ptx(code, [words, pair.view(np.uint32)])
        got = torch.from_numpy(out.view(np.int16)).view(dtype).double().numpy()
        assert (got == nibble - zero).all()


@pytest.mark.parametrize("bits", sorted(PLANES))
@pytest.mark.parametrize("v", range(16))
def test_a_field_minus_its_zero_is_exact(bits: int, v: int) -> None:
    low, high = PLANES[bits]
    words = random_registers(8192).reshape(2, -1)
    planes = [words[0], words[1]][: 2 if high else 1]
    (out,) = run_ptx(FIELD_ASM.value[bits * 16 + v], planes)
    want = (halves(words[0]) >> (v * low % 16)) & ((1 << low) - 1)
    if high:
        want |= ((halves(words[1]) >> (v * high % 16)) & ((1 << high) - 1)) << low
    assert (out.view(np.float16).astype(np.int64) == want - 2 ** (bits - 1)).all()


def shuffled_codes() -> np.ndarray:
    shuffle = np.random.default_rng(0)
    return np.concatenate([shuffle.permutation(np.arange(256, dtype=np.uint8)) for _ in range(8)])


def fp16_of(code: str, codes: np.ndarray) -> np.ndarray:
    pair = run_ptx(code, [codes.view(np.uint32)], outputs=2)
    return np.stack(pair, 1).reshape(-1).view(np.float16).astype(np.float64)


def test_e4m3_becomes_fp16_exactly_its_two_nan_codes_included() -> None:
    codes = shuffled_codes()
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    got = fp16_of(E4M3_ASM.value, codes) * 256
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want)).all()


def test_int8_becomes_fp16_exactly() -> None:
    codes = shuffled_codes()
    np.testing.assert_array_equal(fp16_of(INT8_ASM.value, codes), codes.view(np.int8))
