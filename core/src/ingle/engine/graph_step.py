"""A decode step that stays on the device: embedding to sampled token and back, as one CUDA graph.

Each row's token, position, length and random numbers are tensors that the step itself moves on, so
that step n + 1 may be enqueued before token n is read; the host reads tokens a step late and only
has to give a row its next block in time. What the graph holds is plain torch and the engine's own
kernels; without a card, ``run`` calls the same, which is how it is tested.

Letters: B rows, P blocks of the longest sequence, R places of the rings, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ingle.attention.decode_rows import StepPlan, StepPlanner
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.attention.paged_cuda import PagedCUDAAttention
from ingle.attention.paged_triton import PagedRows, paged_cache
from ingle.engine.device_step import RowStart
from ingle.model.decoder import Decoder
from ingle.model.experts import ExpertMLP
from ingle.model.streamed_layers import StreamedLayer
from ingle.sampling.uniform import uniform

RING = 64
"""Steps whose tokens are kept, and random numbers that are on the device ahead."""
WARM_UPS = 2
"""Runs before the capture: kernels compile and workspaces grow in them."""
ROW_COUNTS = (1, 2, 4, 8, 16, 32)
"""Rows that there are graphs of. Linears cost the same for one to eight; attention does not."""
LARGEST = 1 - 2.0**-52
"""Of the cumulated probabilities, where the last token's share ends (as the sampler has it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """How many rows a step has at most, and blocks each of them, of how many tokens."""

    num_rows: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The first B rows of what a step reads and moves on: views, one set for each graph.

    Attributes:
        tokens: int64 [B], to be computed.
        positions: int64 [B], theirs.
        moves: int64 [B], 1 for a row in use.
        blocks: int32 [B, P].
        row_starts: int32 [B], 0 to B - 1.
        ones: int32 [B].
        temperatures: float32 [B, 1].
        greedy: bool [B].
        numbers: float64 [B, R], random, by position.
        drawn: int64 [R, B], by step.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    moves: torch.Tensor
    blocks: torch.Tensor
    row_starts: torch.Tensor
    ones: torch.Tensor
    temperatures: torch.Tensor
    greedy: torch.Tensor
    numbers: torch.Tensor
    drawn: torch.Tensor

    def first(self, count: int) -> StepRows:
        """The first ``count`` of them."""
        views = {name: getattr(self, name)[:count] for name in self.__slots__}
        return StepRows(**views | {"drawn": self.drawn[:, :count]})


def empty_rows(size: StepSize, device: torch.device) -> StepRows:
    """Rows that nobody uses: they compute token 0 at position 0, into the null block."""
    rows = size.num_rows
    zeros = partial(torch.zeros, device=device)
    return StepRows(
        tokens=zeros(rows, dtype=torch.int64),
        positions=zeros(rows, dtype=torch.int64),
        moves=zeros(rows, dtype=torch.int64),
        blocks=zeros(rows, size.num_blocks, dtype=torch.int32),
        row_starts=torch.arange(rows, dtype=torch.int32, device=device),
        ones=torch.ones(rows, dtype=torch.int32, device=device),
        temperatures=torch.ones(rows, 1, device=device),
        greedy=torch.ones(rows, dtype=torch.bool, device=device),
        numbers=zeros(rows, RING, dtype=torch.float64),
        drawn=zeros(RING, rows, dtype=torch.int64),
    )


def why_not(model: object, caches: Sequence[LayerCache]) -> str:
    """Why a model's step cannot be one graph; empty when it can."""
    if not isinstance(model, Decoder):
        return "only Ingle's own decoder is one graph"
    for layer, cache in zip(model.layers, caches, strict=True):
        if isinstance(layer, StreamedLayer):
            return "layers wait in host memory"
        if isinstance(getattr(layer, "mlp", None), ExpertMLP):
            return "experts are chosen on the host"
        if not isinstance(layer.attention.backend, PagedCUDAAttention):
            return "attention is not the paged kernel"
        if paged_cache(cache) is None:
            return "the cache is not read in place"
    if model.embedding.device != cache_device(caches):
        return "token embeddings lie in host memory"
    return ""


def cache_device(caches: Sequence[LayerCache]) -> torch.device:
    """Where the caches are."""
    return next(iter(caches[0].k_store.tensors().values())).device


class GraphStep:
    """A decode step of up to a fixed number of rows.

    Args:
        model: ``why_not`` of it is empty.
        caches: One per layer.
        size: Rows and blocks.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], size: StepSize) -> None:
        backend = model.layers[0].attention.backend
        self.device = device = cache_device(caches)
        self.num_rows = rows = size.num_rows
        self._model, self._caches, self._size = model, tuple(caches), size
        self._planner: StepPlanner | None = None
        if isinstance(backend, PagedCUDAAttention):
            self._planner = backend.scratch.planner
        self._rows = empty_rows(size, device)
        counts = [count for count in ROW_COUNTS if count < rows]
        self._parts = {count: self._rows.first(count) for count in (*counts, rows)}
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(RING, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._events = [_event() for _ in range(RING)] if device.type == "cuda" else []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._kept: list[torch.Tensor | None] = []  # what graphs write to and others may replace
        self._starts: dict[int, tuple[RowStart, int]] = {}  # row -> start, step it began with
        self._num_steps = 0

    @property
    def is_card(self) -> bool:
        """Whether it runs on a card, where it is captured; elsewhere steps run as they are."""
        return self.device.type == "cuda"

    def capture(self) -> None:
        """Makes the graphs, the largest first: the others find room in its memory. On a card,
        once, before any row is placed."""
        pool = None
        backend = self._model.layers[0].attention.backend
        assert isinstance(backend, PagedCUDAAttention)
        for count in sorted(self._parts, reverse=True):
            rows = self._parts[count]
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._body(rows)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._body(rows)
            pool = pool or graph.pool()
            self._graphs[count] = graph
            self._kept.append(backend.scratch.workspace(1, self.device))
        self._place.zero_()

    def place(self, row: int, start: RowStart) -> None:
        """Puts a sequence into ``row``, from the next step on."""
        self._starts[row] = (start, self._num_steps)
        rows = self._rows
        rows.tokens[row] = start.token_id
        rows.positions[row] = start.position
        rows.moves[row] = 1
        rows.greedy[row] = start.params.greedy
        rows.temperatures[row] = 1.0 if start.params.greedy else start.params.temperature
        self.set_blocks(row, start.block_table)
        if not start.params.greedy:
            self._give_numbers(row, 0, RING)

    def clear(self, row: int) -> None:
        """Takes a sequence out: the row goes on writing to the null block, at position 0."""
        self._starts.pop(row, None)
        self._rows.moves[row] = 0
        self._rows.positions[row] = 0
        self._rows.blocks[row] = 0

    def set_blocks(self, row: int, block_table: Sequence[int]) -> None:
        """Says which blocks a row has; before the step that needs a new one. Those past the
        longest context are never read, and left out."""
        table = torch.tensor(block_table[: self._size.num_blocks], dtype=torch.int32)
        self._rows.blocks[row, : len(table)] = table.to(self.device, non_blocking=True)

    def run(self) -> int:
        """Enqueues a step of as many rows as are needed, and returns its number."""
        for row, (start, begun) in self._starts.items():
            done = self._num_steps - begun
            if done and done % (RING // 2) == 0 and not start.params.greedy:
                self._give_numbers(row, done + RING // 2, RING // 2)
        used = 1 + max(self._starts, default=0)
        count = min(count for count in self._parts if count >= used)
        if self._graphs:
            self._graphs[count].replay()
        else:
            self._body(self._parts[count])
        place = self._num_steps % RING
        self._host[place].copy_(self._rows.drawn[place], non_blocking=True)
        if self._events:
            self._events[place].record()
        self._num_steps += 1
        return self._num_steps - 1

    def tokens(self, step: int) -> list[int]:
        """What the rows drew in one of the last ``RING`` steps, waiting for that step and no later
        one; -1 where logits were not finite."""
        if self._events:
            self._events[step % RING].synchronize()
        drawn: list[int] = self._host[step % RING].tolist()
        return drawn

    def _give_numbers(self, row: int, first: int, count: int) -> None:
        """Random numbers for the row's steps ``first`` onwards, counted from its start."""
        start, _ = self._starts[row]
        steps = range(first, first + count)
        numbers = [uniform(start.seed, start.num_output + step) for step in steps]
        places = torch.tensor([(start.position + step) % RING for step in steps])
        values = torch.tensor(numbers, dtype=torch.float64)
        self._rows.numbers[row, places.to(self.device)] = values.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def _body(self, rows: StepRows) -> None:
        """What a graph holds."""
        batch = self._batch(rows)
        logits = self._model.logits(self._model.hidden_states(batch, self._caches))
        drawn = self._draw(rows, logits)
        rows.tokens.copy_(drawn.clamp(min=0))
        rows.drawn.index_copy_(0, self._place, drawn.unsqueeze(0))
        rows.positions.add_(rows.moves)
        self._place.add_(1).remainder_(RING)

    def _batch(self, rows: StepRows) -> ForwardBatch:
        size, positions = self._size.block_size, rows.positions
        blocks = rows.blocks.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        batch = ForwardBatch(
            token_ids=rows.tokens,
            positions=positions,
            slot_mapping=blocks.long() * size + positions % size,
            spans=(),
        )
        paged = PagedRows(
            block_table=rows.blocks,
            seq_lens=(positions + 1).int(),
            row_starts=rows.row_starts,
            new_lens=rows.ones,
            max_new=1,
        )
        assert self._planner is not None
        self._planner.use(batch, StepPlan(decodes=paged, prompts=None))
        return batch

    def _draw(self, rows: StepRows, logits: torch.Tensor) -> torch.Tensor:
        """One token per row of ``logits`` float32 [B, V]: int64 [B], as the sampler draws them."""
        likeliest = logits.argmax(-1)
        finite = torch.isfinite(logits.amax(-1))
        cumulated = (logits / rows.temperatures).double().softmax(-1).cumsum(-1)
        total = cumulated[:, -1:]
        numbers = rows.numbers.gather(1, (rows.positions % RING).unsqueeze(1))
        target = torch.minimum(numbers * total, total * LARGEST)
        drawn = torch.searchsorted(cumulated, target, right=True).squeeze(1)
        chosen = torch.where(rows.greedy, likeliest, drawn)
        return torch.where(finite, chosen, -1)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
