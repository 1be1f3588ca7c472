"""Random numbers without state: one number per (seed, position), the same in any batch."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on ``seed`` (64 bits of it) and ``position`` alone.

    Nothing is kept between calls, so preemption, batching and speculation cannot change what a
    seeded request draws. A hash rather than a mixing formula: it costs 1 µs a token, and nearby
    seeds and positions cannot run into each other.
    """
    message = struct.pack("<QQ", seed & (2**64 - 1), position)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
