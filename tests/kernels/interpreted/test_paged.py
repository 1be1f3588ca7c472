"""Paged attention against torch's own attention on the gathered sequence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ingle.attention.paged_triton import (
    COUNTER_BYTES,
    PagedConfig,
    PagedKV,
    decode_e4m3,
    encode_e4m3,
    paged_decode,
    paged_decode_reference,
    paged_workspace_bytes,
)

HQ, HK, D, PAGES = 8, 2, 32, 12


def make_cache(page: int, dtype: torch.dtype, *, fp8: bool) -> tuple[PagedKV, list[torch.Tensor]]:
    """A random cache, and the fp32 keys and values [P, HK, S, D] it stands for."""
    keys, values = torch.randn(PAGES, HK, page, D), torch.randn(PAGES, HK, D, page)
    if not fp8:
        cache = PagedKV(k_cache=keys.to(dtype), v_cache=values.to(dtype))
        return cache, [cache.k_cache.float(), cache.v_cache.float().transpose(2, 3)]
    scales = [torch.rand(HK) * 0.01 + 0.01 for _ in range(2)]
    wide = [s[:, None, None] for s in scales]
    codes = [encode_e4m3(t, s) for t, s in zip((keys, values), wide, strict=True)]
    cache = PagedKV(k_cache=codes[0], v_cache=codes[1], k_scale=scales[0], v_scale=scales[1])
    decoded = [decode_e4m3(c, s) for c, s in zip(codes, wide, strict=True)]
    return cache, [decoded[0], decoded[1].transpose(2, 3)]


def torch_attention(
    query: torch.Tensor, dense: list[torch.Tensor], pages: torch.Tensor, length: int
) -> torch.Tensor:
    """query [T, HQ, D] of one sequence; fp64, by torch."""
    tokens = query.shape[0]
    keys, values = (
        t[pages.long()].transpose(0, 1).flatten(1, 2)[:, :length].double() for t in dense
    )
    keys, values = (t.repeat_interleave(HQ // HK, 0) for t in (keys, values))
    mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    out = scaled_dot_product_attention(query.transpose(0, 1).double(), keys, values, mask)
    return out.transpose(0, 1)


def attend(
    query: torch.Tensor,
    cache: PagedKV,
    pages: torch.Tensor,
    lengths: list[int],
    config: PagedConfig,
) -> torch.Tensor:
    out = torch.full_like(query, float("nan"))
    workspace = torch.zeros(paged_workspace_bytes(query, cache, config), dtype=torch.uint8)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    for _ in range(2):  # the second launch relies on the counters the first one left
        paged_decode(query, cache, pages, seq_lens, config, out=out, workspace=workspace)
    assert not workspace[:COUNTER_BYTES].any(), "counters must be left at zero"
    return out


def page_table(lengths: list[int], page: int) -> torch.Tensor:
    count = -(-max(lengths) // page)
    return torch.stack([torch.randperm(PAGES)[:count] for _ in lengths]).to(torch.int32)


@pytest.mark.parametrize(
    ("page", "lengths", "tokens", "dtype", "fp8", "hardware"),
    [
        (64, [150, 17, 64], 1, torch.float16, False, True),
        (64, [130, 3], 3, torch.bfloat16, False, True),
        (32, [130, 1], 1, torch.float16, True, True),
        (64, [66, 64], 2, torch.float16, True, False),
        (16, [90, 3], 1, torch.bfloat16, True, True),
        (16, [70, 33], 3, torch.float16, False, True),
    ],
)
def test_attention_equals_torch(
    page: int,
    lengths: list[int],
    tokens: int,
    dtype: torch.dtype,
    fp8: bool,
    hardware: bool,
) -> None:
    torch.manual_seed(0)
    cache, dense = make_cache(page, dtype, fp8=fp8)
    pages = page_table(lengths, page)
    query = torch.randn(len(lengths), tokens, HQ, D).to(dtype)
    config = PagedConfig(block_tokens=32, splits=3, hardware_fp8=hardware)
    out = attend(query, cache, pages, lengths, config)
    for b, length in enumerate(lengths):
        want = torch_attention(query[b], dense, pages[b], length)
        error = ((out[b].double() - want).norm() / want.norm()).item()
        assert error < (4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_the_reference_equals_torch() -> None:
    cache, dense = make_cache(16, torch.float16, fp8=True)
    pages = page_table([50, 7], 16)
    query = torch.randn(2, 2, HQ, D)
    got = paged_decode_reference(query, cache, pages, torch.tensor([50, 7]))
    for b, length in enumerate((50, 7)):
        want = torch_attention(query[b], dense, pages[b], length).float()
        assert torch.allclose(got[b], want, atol=1e-5)


@pytest.mark.parametrize("fp8", [False, True])
def test_garbage_past_the_end_of_a_sequence_does_not_matter(fp8: bool) -> None:
    cache, _ = make_cache(64, torch.float16, fp8=fp8)
    query, pages = torch.randn(1, 1, HQ, D).half(), torch.tensor([[3, 5]], dtype=torch.int32)
    config = PagedConfig(block_tokens=32, splits=2)
    clean = attend(query, cache, pages, [70], config)
    cache.k_cache[5, :, 6:] = 0x7F if fp8 else float("nan")
    cache.v_cache[5, :, :, 6:] = 0x7F if fp8 else float("nan")
    assert torch.equal(attend(query, cache, pages, [70], config), clean)


def test_an_empty_sequence_gives_zeros() -> None:
    cache, _ = make_cache(16, torch.float16, fp8=False)
    query = torch.randn(1, 1, HQ, D).half()
    out = attend(query, cache, page_table([16], 16), [0], PagedConfig(block_tokens=16, splits=2))
    assert not out.any()


def test_what_the_kernel_cannot_serve_is_declined_with_the_value() -> None:
    cache, _ = make_cache(16, torch.float16, fp8=False)
    pages, lengths = page_table([16], 16), [16]
    with pytest.raises(ValueError, match="float32"):
        attend(torch.zeros(1, 1, HQ, D), cache, pages, lengths, PagedConfig())
    with pytest.raises(ValueError, match="bfloat16"):
        attend(torch.zeros(1, 1, HQ, D).bfloat16(), cache, pages, lengths, PagedConfig())
    with pytest.raises(ValueError, match="7 query heads"):
        attend(torch.zeros(1, 1, 7, D).half(), cache, pages, lengths, PagedConfig())
    with pytest.raises(ValueError, match="caches are"):
        attend(torch.zeros(1, 1, HQ, 64).half(), cache, pages, lengths, PagedConfig())
    bare = PagedKV(k_cache=cache.k_cache.view(torch.uint8)[..., :D], v_cache=cache.v_cache)
    with pytest.raises(ValueError, match="k_scale"):
        attend(torch.zeros(1, 1, HQ, D).half(), bare, pages, lengths, PagedConfig())


@pytest.mark.slow
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_every_length_around_a_tile_border(page: int, fp8: bool, tokens: int) -> None:
    torch.manual_seed(0)
    cache, dense = make_cache(page, torch.float16, fp8=fp8)
    config = PagedConfig(block_tokens=64, splits=2)
    for length in (tokens, 16, 63, 64, 65, 127, 128, 129, 191):
        pages = page_table([length], page)
        query = torch.randn(1, tokens, HQ, D).half()
        out = attend(query, cache, pages, [length], config)
        want = torch_attention(query[0], dense, pages[0], length)
        assert ((out[0].double() - want).norm() / want.norm()).item() < 5e-4
