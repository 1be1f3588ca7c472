"""The free blocks in the order they are given out. No torch here."""

from __future__ import annotations

from collections import OrderedDict

_FREE = b"\x01"


class FreeBlocks:
    """Free blocks: blank ones first, then those with reusable content, longest unused first.

    Consecutive numbers are preferred, because attention on a CPU reads runs of blocks in place.
    Blank blocks are a byte map, so that a run is found by a substring search; blocks with content
    are an ordered map, so that any of them leaves in constant time. Block 0 is never free.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blank = bytearray(_FREE * num_blocks)
        self._blank[0] = 0
        self._num_blank = num_blocks - 1
        self._cached: OrderedDict[int, int] = OrderedDict()  # block -> when it was freed
        self._clock = 0
        self._next_start = 1

    def __len__(self) -> int:
        return self._num_blank + len(self._cached)

    def __contains__(self, block: int) -> bool:
        return bool(self._blank[block]) or block in self._cached

    def is_cached(self, block: int) -> bool:
        """Whether the block is free and its content can still be reused."""
        return block in self._cached

    def add_blank(self, block: int) -> None:
        """Takes back a block whose content is of no use."""
        self._blank[block] = 1
        self._num_blank += 1

    def add_cached(self, block: int) -> None:
        """Takes back a block whose content may be asked for again; it is evicted last."""
        self._clock += 1
        self._cached[block] = self._clock

    def remove(self, block: int) -> None:
        """Takes this free block out."""
        if self._cached.pop(block, None) is None:
            self._blank[block] = 0
            self._num_blank -= 1

    def take(self, count: int, *, after: int, room: int) -> list[int]:
        """``count`` free blocks in ascending order, consecutive where possible.

        Args:
            count: How many; at most ``len(self)``.
            after: The sequence's last block so far, 0 when it has none.
            room: Blocks the sequence may come to need from here on.
        """
        if after and self._blank[after + 1 : after + 1 + count] == _FREE * count:
            blocks = list(range(after + 1, after + 1 + count))
        else:
            blocks = self._find_run(count, room)
        for block in blocks:
            self.remove(block)
        last = after
        while len(blocks) < count:
            last = self._next_block(last)
            self.remove(last)
            blocks.append(last)
        return sorted(blocks)

    def _find_run(self, count: int, room: int) -> list[int]:
        """A run of ``count`` blank blocks, one with room to grow first; empty when there is none.

        The search goes on where the last one ended, so that sequences leave each other room.
        """
        for length in (max(room, count), count):
            wanted = _FREE * length
            start = self._blank.find(wanted, self._next_start)
            start = self._blank.find(wanted) if start < 0 else start
            if start >= 0:
                self._next_start = start + length
                return list(range(start, start + count))
        return []

    def _next_block(self, last: int) -> int:
        """One free block: the neighbour where that is fair, else blank, else longest unused."""
        neighbour = last + 1
        if last and neighbour < len(self._blank) and self._may_follow(neighbour):
            return neighbour
        if self._num_blank:
            return self._blank.find(_FREE)
        return next(iter(self._cached))

    def _may_follow(self, block: int) -> bool:
        """Whether taking ``block`` out of turn is fair: blank, or in the older half by age."""
        if self._blank[block]:
            return True
        freed = self._cached.get(block)
        if freed is None or self._num_blank:
            return False
        oldest = self._cached[next(iter(self._cached))]
        return freed - oldest <= (self._clock - oldest) // 2
