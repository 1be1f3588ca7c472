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

import torch

from ingle.attention.decode_rows import StepPlan, StepPlanner
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.attention.paged_cuda import PagedCUDAAttention
from ingle.attention.paged_triton import PagedRows, paged_cache
from ingle.model.decoder import Decoder
from ingle.request import SamplingParams
from ingle.sampling.pipeline import stages_for
from ingle.sampling.stages import Temperature
from ingle.sampling.uniform import uniform

RING = 64
"""Steps whose tokens are kept, and random numbers that are on the device ahead."""
WARM_UPS = 2
"""Runs before the capture: kernels compile and workspaces grow in them."""
LARGEST = 1 - 2.0**-52
"""Of the cumulated probabilities, where the last token's share ends (as the sampler has it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """How many rows a step has, and blocks each of them at most, of how many tokens."""

    num_rows: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStart:
    """A sequence as it stands before the step.

    Attributes:
        token_id: Its last token, whose keys and values are not in the cache yet.
        position: That token's position.
        block_table: Its blocks.
        params: How to sample; ``draws_on_device`` holds for them.
        seed: The sequence's seed.
        num_output: Tokens generated so far, ``token_id`` included when it was.
    """

    token_id: int
    position: int
    block_table: Sequence[int]
    params: SamplingParams
    seed: int
    num_output: int


def draws_on_device(params: SamplingParams, eos_token_ids: Sequence[int]) -> bool:
    """Whether a request's tokens can be drawn inside the graph: greedy, or by temperature alone.
    Others need the host between two steps."""
    wants = (params.structured, params.logprobs, params.prompt_logprobs, params.pooling)
    if any(want is not None for want in wants) or params.mirostat_mode:
        return False
    stages = stages_for(params, eos_token_ids)
    return all(isinstance(stage, Temperature) for stage in stages)


def why_not(model: object, caches: Sequence[LayerCache]) -> str:
    """Why a model's step cannot be one graph; empty when it can."""
    if not isinstance(model, Decoder):
        return "only Ingle's own decoder"
    for layer, cache in zip(model.layers, caches, strict=True):
        backend = layer.attention.backend
        if not isinstance(backend, PagedCUDAAttention):
            return "attention is not the paged kernel"
        if paged_cache(cache) is None:
            return "the cache is not read in place"
    where = cache_device(caches)
    if model.embedding.device != where:
        return "token embeddings lie in host memory"
    return ""


def cache_device(caches: Sequence[LayerCache]) -> torch.device:
    """Where the caches are."""
    return next(iter(caches[0].k_store.tensors().values())).device


class GraphStep:
    """A decode step of a fixed number of rows.

    Args:
        model: ``why_not`` of it is empty.
        caches: One per layer.
        size: Rows and blocks.
    """

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], size: StepSize) -> None:
        backend = model.layers[0].attention.backend
        assert isinstance(backend, PagedCUDAAttention)
        device, rows = cache_device(caches), size.num_rows
        self.device = device
        self._model, self._caches, self._size = model, tuple(caches), size
        self._planner: StepPlanner = backend.scratch.planner
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._row_starts = torch.arange(rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self._moves = torch.zeros(rows, dtype=torch.int64, device=device)  # 1 for a row in use
        self._blocks = torch.zeros(rows, size.num_blocks, dtype=torch.int32, device=device)
        self._temperatures = torch.ones(rows, 1, device=device)
        self._greedy = torch.ones(rows, dtype=torch.bool, device=device)
        self._numbers = torch.zeros(rows, RING, dtype=torch.float64, device=device)
        self._drawn = torch.zeros(RING, rows, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        is_card = device.type == "cuda"
        self._host = torch.zeros(RING, rows, dtype=torch.int64, pin_memory=is_card)
        self._events = [_event() for _ in range(RING)] if is_card else []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._starts: dict[int, tuple[RowStart, int]] = {}  # row -> start, step it began with
        self._num_steps = 0

    def capture(self) -> None:
        """Makes the graph. On a card, once, before any row is placed."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._body()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._body()
        self._place.zero_()

    def place(self, row: int, start: RowStart) -> None:
        """Puts a sequence into ``row``, from the next step on."""
        self._starts[row] = (start, self._num_steps)
        self._tokens[row] = start.token_id
        self._positions[row] = start.position
        self._moves[row] = 1
        self._greedy[row] = start.params.greedy
        self._temperatures[row] = 1.0 if start.params.greedy else start.params.temperature
        self.set_blocks(row, start.block_table)
        if not start.params.greedy:
            self._give_numbers(row, 0, RING)

    def clear(self, row: int) -> None:
        """Takes a sequence out: the row goes on writing to the null block, at position 0."""
        self._starts.pop(row, None)
        self._moves[row] = 0
        self._positions[row] = 0
        self._blocks[row] = 0

    def set_blocks(self, row: int, block_table: Sequence[int]) -> None:
        """Says which blocks a row has; before the step that needs a new one."""
        table = torch.tensor(block_table, dtype=torch.int32)
        self._blocks[row, : len(block_table)] = table.to(self.device, non_blocking=True)

    def run(self) -> int:
        """Enqueues a step and returns its number."""
        for row, (start, begun) in self._starts.items():
            done = self._num_steps - begun
            if done and done % (RING // 2) == 0 and not start.params.greedy:
                self._give_numbers(row, done + RING // 2, RING // 2)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()
        place = self._num_steps % RING
        self._host[place].copy_(self._drawn[place], non_blocking=True)
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
        self._numbers[row, places.to(self.device)] = values.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def _body(self) -> None:
        """What the graph holds."""
        batch = self._batch()
        logits = self._model.logits(self._model.hidden_states(batch, self._caches))
        drawn = self._draw(logits)
        self._tokens.copy_(drawn.clamp(min=0))
        self._drawn.index_copy_(0, self._place, drawn.unsqueeze(0))
        self._positions += self._moves
        self._place.add_(1).remainder_(RING)

    def _batch(self) -> ForwardBatch:
        size, positions = self._size.block_size, self._positions
        blocks = self._blocks.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        batch = ForwardBatch(
            token_ids=self._tokens,
            positions=positions,
            slot_mapping=blocks.long() * size + positions % size,
            spans=(),
        )
        rows = PagedRows(
            block_table=self._blocks,
            seq_lens=(positions + 1).int(),
            row_starts=self._row_starts,
            new_lens=self._ones,
            max_new=1,
        )
        self._planner.use(batch, StepPlan(decodes=rows, prompts=None))
        return batch

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """One token per row of ``logits`` float32 [B, V]: int64 [B], as the sampler draws them."""
        likeliest = logits.argmax(-1)
        finite = torch.isfinite(logits.amax(-1))
        cumulated = (logits / self._temperatures).double().softmax(-1).cumsum(-1)
        total = cumulated[:, -1:]
        numbers = self._numbers.gather(1, (self._positions % RING).unsqueeze(1))
        target = torch.minimum(numbers * total, total * LARGEST)
        drawn = torch.searchsorted(cumulated, target, right=True).squeeze(1)
        chosen = torch.where(self._greedy, likeliest, drawn)
        return torch.where(finite, chosen, -1)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
