"""How decode steps attend on a card: so that they fill it, or as was measured on it.

Letters: S sequences, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingle.attention.paged_triton import COUNTER_BYTES, PagedConfig, decode_config
from ingle.plugin.launches import TunedLaunches

VERSION = 1
"""Of the kernel: what was measured for another does not count."""
SPLITS = (1, 8, 32)
"""Programs along a sequence, few choices because each is compiled. Too many cost little: those
without tokens end at once."""
PROGRAMS_PER_SM = 2
"""Programs that keep a multiprocessor busy: four warps each, with most of its registers."""
TUNED_SPLITS = (1, 2, 4, 8, 16, 32, 64)
TUNED_SEQUENCES = (1, 2, 4, 8, 16, 32)
"""Of which launches are measured."""
LEAST_PER_SM, MOST_PER_SM = 0.5, 8
"""Programs to a multiprocessor that are worth measuring."""


def default_splits(programs: int, num_sms: int) -> int:
    """Splits that fill the card; ``programs``: S * H, before a split."""
    if programs * 4 > COUNTER_BYTES:
        return 1
    wanted = PROGRAMS_PER_SM * num_sms // programs
    return next((splits for splits in SPLITS if splits >= wanted), SPLITS[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What attention of a model's decode steps depends on, beside the card and the sequences. No
    sliding window: those layers read little, and are launched as by default.

    Attributes:
        num_heads, num_kv_heads, head_dim: Q, H, D.
        block_size: Tokens in a block of the cache.
        formats: Names of the formats of keys and of values.
        dtype: Of the activations.
        has_softcap: Whether scaled logits are bounded.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    formats: tuple[str, str]
    dtype: torch.dtype
    has_softcap: bool

    def key(self, num_sequences: int) -> str:
        """What a measurement holds for."""
        heads = f"{self.num_heads} on {self.num_kv_heads} heads of {self.head_dim}"
        cache = f"cache {','.join(self.formats)} blocks of {self.block_size}"
        capped = " softcap" if self.has_softcap else ""
        return f"decode v{VERSION} {num_sequences} x {heads} {cache} {self.dtype}{capped}"

    def launches(self, num_sequences: int, num_sms: int) -> list[PagedConfig]:
        """Launches that may be good, the default one first; none that would spill."""
        group = self.num_heads // self.num_kv_heads
        default = DecodeLaunches(num_sms=num_sms)(
            num_sequences, self.num_kv_heads, self.head_dim, group
        )
        return list(dict.fromkeys([default, *self._others(default, num_sequences, num_sms)]))

    def _others(
        self, default: PagedConfig, num_sequences: int, num_sms: int
    ) -> Iterator[PagedConfig]:
        programs = num_sequences * self.num_kv_heads
        for splits in TUNED_SPLITS:
            per_sm = programs * splits / num_sms
            is_too_many = per_sm > MOST_PER_SM or programs * 4 > COUNTER_BYTES
            if per_sm < LEAST_PER_SM or (splits > 1 and is_too_many):
                continue
            for tokens, warps in tiles(self.head_dim):
                yield replace(default, splits=splits, block_tokens=tokens, num_warps=warps)

    def measured(self, tuned: TunedLaunches, num_sms: int) -> dict[int, PagedConfig]:
        """What was measured on the card, by sequences."""
        found = {
            size: tuned.get(self.key(size), self.launches(size, num_sms))
            for size in TUNED_SEQUENCES
        }
        return {size: config for size, config in found.items() if config is not None}


def tiles(head_dim: int) -> tuple[tuple[int, int], ...]:
    """Tokens and warps of tiles that may be good for decode steps. 64 tokens of heads of 128 do not
    fit the registers of two warps."""
    if head_dim > 128:
        return ((32, 4),)
    if head_dim > 64:
        return ((64, 4), (32, 4), (32, 2))
    return ((64, 2), (64, 4), (32, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunches:
    """How decode steps of a model are launched.

    Attributes:
        num_sms: Multiprocessors of the card.
        measured: Launches by sequences (``TUNED_SEQUENCES``); a step of another number is launched
            as the next larger of them.
    """

    num_sms: int
    measured: Mapping[int, PagedConfig] = field(default_factory=dict)

    def __call__(
        self, num_sequences: int, num_kv_heads: int, head_dim: int, group: int
    ) -> PagedConfig:
        """For S sequences, H heads of size D, and Q / H query heads to each of them."""
        if num_sequences <= TUNED_SEQUENCES[-1] and self.measured:
            size = min(size for size in TUNED_SEQUENCES if size >= num_sequences)
            if size in self.measured:
                return self.measured[size]
        splits = default_splits(num_sequences * num_kv_heads, self.num_sms)
        return decode_config(head_dim, group, splits)

    def batch_sizes(self, num_kv_heads: int, head_dim: int, group: int) -> list[int]:
        """For every launch there is, the smallest number of sequences that gets it."""
        first: dict[PagedConfig, int] = {}
        for size in range(1, PROGRAMS_PER_SM * self.num_sms + 2):
            first.setdefault(self(size, num_kv_heads, head_dim, group), size)
        return list(first.values())
