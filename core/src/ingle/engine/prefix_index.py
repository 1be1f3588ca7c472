"""Which block holds the keys and values of which tokens, to the token. No torch here."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence as AnySequence
from hashlib import sha256

Tokens = tuple[int, ...]


def root_digest(cache_salt: str | None) -> bytes:
    """The digest before the first block. Salts are tagged, so no salt equals the absence of one."""
    if cache_salt is None:
        return sha256(b"unsalted").digest()
    return sha256(b"salted:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def chain_digest(parent: bytes, token_ids: AnySequence[int]) -> bytes:
    """The digest after a full block, from the digest before it and its tokens."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def common_prefix_length(left: AnySequence[int], right: AnySequence[int]) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter  # equal up to low, different within high
    while low + 1 < high:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixIndex:
    """Maps the digest of everything before a block to the blocks that continue it.

    A child is full or partial and stored with its tokens, which are compared on every look-up.
    The children of a digest are kept sorted by their tokens: the one that shares most with a
    query is then a neighbour of the place where the query would stand.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[Tokens, int]]] = {}
        self._entries: dict[int, tuple[bytes, Tokens]] = {}  # block -> (parent digest, tokens)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def tokens(self, block: int) -> Tokens:
        """The tokens an indexed block is known to hold."""
        return self._entries[block][1]

    def find(self, parent: bytes, query: Tokens) -> tuple[int, int]:
        """The child that shares most leading tokens with ``query``: (block, tokens shared)."""
        children = self._children.get(parent, ())
        at = bisect_left(children, (query,))
        best, shared = 0, 0
        for tokens, block in children[max(0, at - 1) : at + 1]:
            length = common_prefix_length(tokens, query)
            if length > shared:
                best, shared = block, length
        return best, shared

    def insert(self, parent: bytes, tokens: Tokens, block: int) -> None:
        """Says that ``block`` holds ``tokens`` after ``parent``, replacing what it said before.

        A block whose tokens all stand in another child already is left out.
        """
        if self._entries.get(block) == (parent, tokens):
            return
        self.remove(block)
        if not tokens or self.find(parent, tokens)[1] == len(tokens):
            return
        children = self._children.setdefault(parent, [])
        children.insert(bisect_left(children, (tokens, block)), (tokens, block))
        self._entries[block] = (parent, tokens)

    def remove(self, block: int) -> bool:
        """Forgets what ``block`` holds; whether anything was known."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return False
        parent, tokens = entry
        children = self._children[parent]
        del children[bisect_left(children, (tokens, block))]
        if not children:
            del self._children[parent]
        return True

    def check_integrity(self, block_size: int) -> None:
        """Raises RuntimeError when the two maps disagree."""
        seen = {}
        for parent, children in self._children.items():
            if not children or children != sorted(children):
                raise RuntimeError(f"children of {parent.hex()} are empty or out of order")
            for tokens, block in children:
                if block in seen or not 0 < len(tokens) <= block_size:
                    raise RuntimeError(f"block {block} is indexed twice or with a wrong length")
                seen[block] = (parent, tokens)
        if seen != self._entries:
            raise RuntimeError("index entries and children disagree")
