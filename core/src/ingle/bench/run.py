"""Measures a model, in alternation with its peers where there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingle.bench.figure import Figure
from ingle.bench.measure import Measurer
from ingle.bench.peer import Peer
from ingle.bench.result import OWN, Result
from ingle.bench.workload import Workload


class Run:
    """One benchmark.

    Args:
        measurer: Measures Ingle.
        peers: Loaded, measured in the same turns.
        workload: What is measured.
        longest: Tokens that a sequence may have.
        most: Sequences that the engine runs together.
    """

    def __init__(
        self,
        measurer: Measurer,
        peers: Sequence[Peer],
        workload: Workload,
        longest: int,
        most: int,
    ) -> None:
        self._measurer = measurer
        self._peers = peers
        self._workload = workload
        self._prefill_tokens = min(workload.prefill_tokens, longest - 1)
        self._batches = [size for size in workload.batches if size <= most]

    def result(self) -> Result:
        """Measures everything."""
        decode = {size: self._decode(size) for size in self._batches}
        firsts: list[float] = []
        cached: list[float] = []

        def prefill() -> float:
            found = self._measurer.prefill(self._prefill_tokens)
            firsts.append(found.seconds)
            if found.cached_seconds is not None:
                cached.append(found.cached_seconds)
            return found.num_tokens / found.seconds

        speeds = self._in_turns(prefill, lambda peer: peer.prefill(self._prefill_tokens))
        return Result(
            decode=decode,
            prefill=speeds,
            first_token=Figure.of(firsts[1:]),
            first_token_cached=Figure.of(cached[1:]) if cached else None,
            prefill_tokens=self._prefill_tokens,
        )

    def _decode(self, size: int) -> dict[str, Figure]:
        work = (size, self._workload.prompt_tokens, self._workload.output_tokens)
        return self._in_turns(lambda: self._measurer.decode(*work), lambda peer: peer.decode(*work))

    def _in_turns(
        self, own: Callable[[], float], others: Callable[[Peer], float]
    ) -> dict[str, Figure]:
        """Every engine once a turn; the first turn warms up and is thrown away."""
        values: dict[str, list[float]] = {OWN: [], **{peer.name: [] for peer in self._peers}}
        for _ in range(self._workload.repeats + 1):
            values[OWN].append(own())
            for peer in self._peers:
                values[peer.name].append(others(peer))
        return {name: Figure.of(found[1:]) for name, found in values.items()}
