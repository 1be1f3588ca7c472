"""The packing primitives against integers of unlimited size."""

from __future__ import annotations

import pytest
import torch

from ingle.errors import PluginError
from ingle.plugin.affine_packing import (
    candidate_bits,
    num_words,
    pack_bits,
    reorder_runs,
    repack_words,
    unpack_bits,
)

WORD_DTYPES = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)


def words_by_definition(codes: list[int], bits: int, word_bits: int) -> list[int]:
    """One stream as one big number, cut into signed words."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // word_bits)
    words = [(stream >> (i * word_bits)) & ((1 << word_bits) - 1) for i in range(count)]
    signed = word_bits > 8
    return [w - (1 << word_bits) if signed and w >> (word_bits - 1) else w for w in words]


@pytest.mark.parametrize("word_bits", WORD_DTYPES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_stream_of_words_of_any_size_unpacks_to_its_codes(bits: int, word_bits: int) -> None:
    codes = random_codes(bits, 3, 50)
    rows = [words_by_definition(row, bits, word_bits) for row in codes.tolist()]
    words = torch.tensor(rows, dtype=WORD_DTYPES[word_bits])
    assert torch.equal(unpack_bits(words, bits, 50), codes)
    assert torch.equal(unpack_bits(words.T.contiguous(), bits, 50, axis=0), codes)


@pytest.mark.parametrize("count", [1, 8, 31, 32, 50, 96])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_gives_the_words_of_the_definition(bits: int, count: int) -> None:
    codes = random_codes(bits, 2, count)
    wanted = [words_by_definition(row, bits, 32) for row in codes.tolist()]
    assert pack_bits(codes, bits).tolist() == wanted


@pytest.mark.parametrize("word_bits", WORD_DTYPES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_repacking_transposes_words_without_touching_codes(bits: int, word_bits: int) -> None:
    codes = random_codes(bits, 3, 100)
    rows = [words_by_definition(row, bits, word_bits) for row in codes.tolist()]
    columns = torch.tensor(rows, dtype=WORD_DTYPES[word_bits]).T.contiguous()
    assert torch.equal(repack_words(columns, bits, 100, axis=0), pack_bits(codes, bits))


def test_repacking_one_column_copies_it() -> None:
    words = torch.arange(4, dtype=torch.int32).unsqueeze(1)
    packed = repack_words(words, 4, 32, axis=0)
    packed.zero_()
    assert words.flatten().tolist() == [0, 1, 2, 3]


def test_taking_more_codes_than_there_are_is_refused() -> None:
    with pytest.raises(PluginError, match="cannot take 9 codes of 4 bits"):
        unpack_bits(torch.zeros(1, 1, dtype=torch.int32), 4, 9)


def test_an_interleave_is_undone_by_its_inverse() -> None:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    inverse = sorted(range(8), key=order.__getitem__)
    codes = random_codes(4, 2, 32)
    assert torch.equal(reorder_runs(reorder_runs(codes, order), inverse), codes)


def test_the_width_follows_from_codes_and_words_alone() -> None:
    for bits in range(2, 9):
        assert candidate_bits(64, num_words(64, bits)) == (bits,)
    assert candidate_bits(4, 1) == (2, 3, 4, 5, 6, 7, 8)
    assert candidate_bits(64, 1) == ()
