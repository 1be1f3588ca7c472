"""fp8 codes against an oracle: every bfloat16 there is, and every code there is."""

from __future__ import annotations

import math
from bisect import bisect_left
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingle_kv_fp8.codec import E4M3, E5M2, Codec

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2"
CODECS = {"e4m3": (E4M3(), 4, 3), "e5m2": (E5M2(), 5, 2)}


def code_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A code's value from the definition of the type, in Python's float64."""
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if exponent_bits == 5 and exponent == top:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent_bits == 4 and exponent == top and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def nearest_code(x: float, values: list[float]) -> int:
    """Round to nearest, ties to the even code, saturating; ``values`` are those of codes 0, 1, …"""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    magnitude = abs(x)
    if magnitude >= values[-1]:
        return sign | (len(values) - 1)
    above = bisect_left(values, magnitude)
    if values[above] == magnitude:
        return sign | above
    below = above - 1
    low, high = magnitude - values[below], values[above] - magnitude
    if low == high:
        return sign | (below if below % 2 == 0 else above)
    return sign | (below if low < high else above)


def finite_values(exponent_bits: int, mantissa_bits: int) -> list[float]:
    values = [code_value(code, exponent_bits, mantissa_bits) for code in range(0x80)]
    return [value for value in values if math.isfinite(value)]


def every_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_every_bfloat16_is_rounded_to_nearest_even_and_saturated(
    name: str, dtype: torch.dtype
) -> None:
    codec, exponent_bits, mantissa_bits = CODECS[name]
    values = finite_values(exponent_bits, mantissa_bits)
    x = every_bfloat16()
    found = codec.encode(x.to(dtype)).tolist()
    wrong = [
        (value, code)
        for value, code in zip(x.double().tolist(), found, strict=True)
        if not math.isnan(value) and code != nearest_code(value, values)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", CODECS)
def test_every_float16_is_rounded_to_nearest_even_and_saturated(name: str) -> None:
    codec, exponent_bits, mantissa_bits = CODECS[name]
    values = finite_values(exponent_bits, mantissa_bits)
    x = every_bfloat16().view(torch.float16)
    found = codec.encode(x).tolist()
    wrong = [
        (value, code)
        for value, code in zip(x.double().tolist(), found, strict=True)
        if not math.isnan(value) and code != nearest_code(value, values)
    ]
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_nan_stays_nan_and_infinity_becomes_the_largest_number(
    name: str, dtype: torch.dtype
) -> None:
    codec, _, _ = CODECS[name]
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -0.0])
    found = codec.decode(codec.encode(x.to(dtype))).double()
    assert found[:2].isnan().all()
    assert found[2:6].tolist() == [codec.largest, -codec.largest] * 2
    assert torch.signbit(found[6:]).tolist() == [False, True]


@pytest.mark.parametrize("name", CODECS)
def test_every_code_decodes_to_its_value(name: str) -> None:
    codec, exponent_bits, mantissa_bits = CODECS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = [code_value(code, exponent_bits, mantissa_bits) for code in range(256)]
    found = codec.decode(codes).double()
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(found[128]), "minus zero"


@pytest.mark.parametrize("name", CODECS)
def test_decoding_without_a_nan_among_the_codes_gives_the_same(name: str) -> None:
    codec, exponent_bits, mantissa_bits = CODECS[name]
    codes = torch.arange(len(finite_values(exponent_bits, mantissa_bits)), dtype=torch.uint8)
    wanted = [code_value(code, exponent_bits, mantissa_bits) for code in codes.tolist()]
    assert codec.decode(codes).double().tolist() == wanted
    assert codec.decode(codes[:0]).shape == (0,)


@pytest.mark.parametrize("name", CODECS)
def test_every_finite_code_is_kept_by_decoding_and_encoding(name: str) -> None:
    codec, exponent_bits, mantissa_bits = CODECS[name]
    finite = len(finite_values(exponent_bits, mantissa_bits))
    codes = torch.cat([torch.arange(finite), torch.arange(128, 128 + finite)]).to(torch.uint8)
    assert torch.equal(codec.encode(codec.decode(codes)), codes)


@pytest.mark.parametrize("name", CODECS)
def test_strided_codes_are_decoded_in_their_order(name: str) -> None:
    codec, _, _ = CODECS[name]
    codes = torch.randint(0, 0x7B, (6, 10), dtype=torch.uint8)
    assert torch.equal(codec.decode(codes.T), codec.decode(codes).T)


def test_decoding_reads_the_e5m2_codes_of_another_engine() -> None:
    """exllamav2's 8-bit cache is e5m2 too, so its bytes decode here. Its codes are truncated
    float16 words, ours are rounded: the two differ by at most one code, and ours is nearer."""
    case = load_file(VECTORS / "kv_cache.safetensors")
    codec: Codec = E5M2()
    codes, x = case["fp8.codes"], case["x"]
    assert torch.equal(codec.decode(codes), case["fp8.expected"])
    mine = codec.encode(x)
    steps = mine.int() - codes.int()
    assert set(steps.unique().tolist()) == {0, 1}, "rounding only ever goes away from zero"
    exact = x.double()
    error = (codec.decode(mine).double() - exact).abs()
    truncated = (codec.decode(codes).double() - exact).abs()
    assert (error <= truncated).all()
