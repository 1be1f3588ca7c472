"""Who holds which cache block, and which blocks can be reused. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ingle.engine.free_blocks import FreeBlocks
from ingle.engine.prefix_index import PrefixIndex, chain_digest, root_digest
from ingle.engine.sequence import Sequence
from ingle.errors import ConfigError

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that begin a sequence.

    Attributes:
        shared: Full blocks, shared by reference.
        source: A block whose beginning continues them, or the null block.
        num_source_tokens: How many tokens of ``source`` match.
        adopt: Whether the sequence may go on writing in ``source`` itself: nobody else holds it
            and everything known in it matches. Otherwise it is copied.
    """

    shared: tuple[int, ...] = ()
    source: int = NULL_BLOCK
    num_source_tokens: int = 0
    adopt: bool = False


class BlockManager:
    """Gives cache blocks to sequences, counts their holders and finds reusable beginnings.

    Block 0 is the null block: never given out, a harmless target for padding.

    Invariants (``check_integrity``): every other block is either free or held, never both; a
    block's holders are the block tables it stands in and the copies it is the source of; indexed
    tokens are computed tokens.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"The KV cache has room for {num_blocks} blocks of {block_size} tokens and needs 2 "
                "at least. Give --kv-cache-memory-bytes more, or take a smaller --block-size."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Frees every block, whoever holds it, and forgets what was cached."""
        self._free = FreeBlocks(self.num_blocks)
        self._num_holders = [0] * self.num_blocks
        self._index = PrefixIndex()
        self._pending_copies: dict[int, int] = {}  # target -> source

    # -- what others want to know ------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """Blocks there are to give out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, reusable content or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0 to 1."""
        return 1 - len(self._free) / self.num_usable_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole cache holds."""
        return self.num_usable_blocks * self.block_size

    @property
    def pending_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) pairs the next step must copy before it writes anything."""
        return tuple((source, target) for target, source in self._pending_copies.items())

    # -- what the scheduler asks for ---------------------------------------------------------

    def allocate(self, sequence: Sequence, headroom: int = 0) -> bool:
        """Gives a sequence blocks for all its known tokens, reusing what is cached.

        Sets its block table and the number of tokens already computed.

        Args:
            sequence: One that holds no blocks.
            headroom: Blocks to leave free.

        Returns:
            False, with nothing changed, when there is no room.
        """
        match = self._find_match(sequence)
        if not self._has_room(sequence, match, headroom):
            match = PrefixMatch(shared=match.shared)  # a copy's source takes a block of its own
            if not self._has_room(sequence, match, headroom):
                return False
        self._take_match(sequence, match)
        self.grow(sequence)
        if match.source and not match.adopt:
            self._pending_copies[sequence.block_table[len(match.shared)]] = match.source
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence the blocks its known tokens lack; False when too few are free."""
        table = sequence.block_table
        count = self._num_blocks_for(sequence.num_tokens) - len(table)
        if count <= 0:
            return True
        if count > len(self._free):
            return False
        longest = len(sequence.prompt_token_ids) + sequence.max_tokens
        room = self._num_blocks_for(longest) - len(table)
        for block in self._free.take(count, after=table[-1] if table else 0, room=room):
            self._index.remove(block)
            self._num_holders[block] = 1
            table.append(block)
        return True

    def grow_for_drafts(self, sequence: Sequence, count: int, headroom: int) -> int:
        """How many of ``count`` guessed tokens the sequence has room for, a free block included
        when more than ``headroom`` are left."""
        wanted = sequence.num_tokens + count
        table, size = sequence.block_table, self.block_size
        if self._num_blocks_for(wanted) > len(table) and len(self._free) > headroom:
            for block in self._free.take(1, after=table[-1], room=1):
                self._index.remove(block)
                self._num_holders[block] = 1
                table.append(block)
        return min(count, len(table) * size - sequence.num_tokens)

    def commit_copies(self) -> None:
        """Says that the pending copies were executed; their sources may go."""
        for source in self._pending_copies.values():
            self._release(source)
        self._pending_copies.clear()

    def index(self, sequence: Sequence, *, with_tail: bool = False) -> None:
        """Makes a sequence's computed full blocks reusable, and its partial one ``with_tail``."""
        if not self.enable_prefix_caching:
            return
        size, computed = self.block_size, sequence.num_computed_tokens
        for at in range(sequence.num_indexed_blocks, computed // size):
            self._insert(sequence, at, size)
        sequence.num_indexed_blocks = computed // size
        if with_tail and computed % size:
            self._insert(sequence, computed // size, computed % size)

    def free(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back; what it computed stays reusable until evicted.

        The last block is freed first and so evicted first: a beginning outlives what follows it.
        """
        self._drop_copies(sequence)
        self.index(sequence, with_tail=True)
        self._release_table(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back and makes sure nobody reuses them (NaN, say)."""
        self._drop_copies(sequence)
        for block in sequence.block_table:
            self._index.remove(block)
        self._release_table(sequence)

    # -- how -----------------------------------------------------------------------------------

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _digest_before(self, sequence: Sequence, at: int) -> bytes:
        """The digest of everything before the sequence's block ``at``; computed once."""
        if at == 0:
            return root_digest(sequence.params.cache_salt)
        digests, size = sequence.block_digests, self.block_size
        while len(digests) < at:
            done = len(digests)
            parent = digests[-1] if digests else root_digest(sequence.params.cache_salt)
            tokens = sequence.token_ids[done * size : (done + 1) * size]
            digests.append(chain_digest(parent, tokens))
        return digests[at - 1]

    def _find_match(self, sequence: Sequence) -> PrefixMatch:
        """The longest cached beginning, of tokens whose logits nobody needs: they come from
        computing."""
        if not self.enable_prefix_caching:
            return PrefixMatch()
        size, limit = self.block_size, sequence.num_reusable_tokens
        shared: list[int] = []
        while (start := len(shared) * size) < limit:
            query = tuple(sequence.token_ids[start : min(start + size, limit)])
            block, length = self._index.find(self._digest_before(sequence, len(shared)), query)
            if length == size:
                shared.append(block)
                continue
            whole = length > 0 and length == len(self._index.tokens(block))
            adopt = whole and self._num_holders[block] == 0
            return PrefixMatch(tuple(shared), block, length, adopt)
        return PrefixMatch(tuple(shared))

    def _has_room(self, sequence: Sequence, match: PrefixMatch, headroom: int) -> bool:
        needed = self._num_blocks_for(sequence.num_tokens) - len(match.shared) - match.adopt
        reused = [*match.shared, *([match.source] if match.source else [])]
        revived = sum(self._num_holders[block] == 0 for block in reused)
        return needed + revived + headroom <= len(self._free)

    def _take_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        for block in match.shared:
            self._hold(block)
        if match.source:
            self._hold(match.source)
        sequence.block_table = [*match.shared, *([match.source] if match.adopt else [])]
        sequence.num_indexed_blocks = len(match.shared)
        computed = len(match.shared) * self.block_size + match.num_source_tokens
        sequence.num_computed_tokens = computed

    def _insert(self, sequence: Sequence, at: int, num_tokens: int) -> None:
        start = at * self.block_size
        tokens = tuple(sequence.token_ids[start : start + num_tokens])
        block = sequence.block_table[at]
        self._index.insert(self._digest_before(sequence, at), tokens, block)

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            self._free.remove(block)
        self._num_holders[block] += 1

    def _release(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if block in self._index:
            self._free.add_cached(block)
        else:
            self._free.add_blank(block)

    def _release_table(self, sequence: Sequence) -> None:
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_indexed_blocks = 0

    def _drop_copies(self, sequence: Sequence) -> None:
        """Forgets copies into the sequence's blocks that no step has executed.

        Tokens that would have come with them don't count as computed.
        """
        if not self._pending_copies:
            return
        for at, block in enumerate(sequence.block_table):
            source = self._pending_copies.pop(block, None)
            if source is not None:
                self._release(source)
                limit = at * self.block_size
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, limit)

    # -- whether all of that is right ----------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises RuntimeError unless blocks, holders, copies and index agree.

        Args:
            sequences: Every sequence that holds blocks.
        """
        holders: Counter[int] = Counter(self._pending_copies.values())
        for sequence in sequences:
            holders.update(sequence.block_table)
            self._check_sequence(sequence)
        for block in range(1, self.num_blocks):
            self._check_block(block, holders[block])
        held = sum(count > 0 for count in self._num_holders)
        if held + len(self._free) != self.num_usable_blocks or holders[NULL_BLOCK]:
            raise RuntimeError(
                f"{held} held and {len(self._free)} free of {self.num_usable_blocks}"
            )
        self._index.check_integrity(self.block_size)

    def _check_block(self, block: int, num_holders: int) -> None:
        if self._num_holders[block] != num_holders:
            raise RuntimeError(
                f"block {block} counts {self._num_holders[block]} holders and has {num_holders}"
            )
        if (block in self._free) != (num_holders == 0):
            raise RuntimeError(f"block {block} is free and held, or neither")
        if num_holders == 0 and self._free.is_cached(block) != (block in self._index):
            raise RuntimeError(f"free block {block}: order of eviction and index disagree")

    def _check_sequence(self, sequence: Sequence) -> None:
        table, size = sequence.block_table, self.block_size
        if len(set(table)) != len(table) or sequence.num_computed_tokens > len(table) * size:
            raise RuntimeError(f"{sequence.sequence_id} has a bad block table {table}")
        for at, block in enumerate(table):
            if block not in self._index:
                continue
            tokens = self._index.tokens(block)
            computed = sequence.token_ids[at * size : sequence.num_computed_tokens]
            shared = min(len(tokens), len(computed))
            if list(tokens[:shared]) != computed[:shared]:
                raise RuntimeError(f"block {block} is indexed under tokens it does not hold")
