"""The conformance tests of a KV-cache format.

Shape letters: T tokens, H key/value heads, D head size, B blocks, S tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar, Literal, cast

import torch

from ingle.plugin import KVCacheFormat, KVCacheGeometry, KVStore
from ingle.testing.foreign import FOREIGN_CHECKPOINTS
from ingle.testing.plugin_module import PluginConformance
from ingle.testing.tolerance import normal, relative_error

NUM_BLOCKS = 9
LARGE_TOKENS = 2048
"""Enough for a write to be spread over threads, which is where repeated slots go wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase:
    """One store to write to and read from.

    Attributes:
        label: Side and dtype, for test output.
        bound: Relative Frobenius error allowed between what is written and what is read.
    """

    label: str
    format: KVCacheFormat
    store: KVStore
    bound: float

    @property
    def geometry(self) -> KVCacheGeometry:
        """What the store was allocated for."""
        return self.store.geometry

    @property
    def num_slots(self) -> int:
        """B * S."""
        return self.store.num_blocks * self.geometry.block_size

    def values(self, tokens: int, seed: int = 1) -> torch.Tensor:
        """Standard normal keys or values [T, H, D]."""
        shape = (tokens, self.geometry.num_kv_heads, self.geometry.head_dim)
        return normal(*shape, dtype=self.geometry.dtype, seed=seed)

    def write(self, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores ``x [T, H, D]`` at ``slots``."""
        self.format.write(self.store, x, slots)

    def read(self) -> torch.Tensor:
        """Every slot, in order: [B*S, H, D]."""
        blocks = torch.arange(self.store.num_blocks)
        return self.format.gather(self.store, blocks, self.num_slots).transpose(0, 1)


class KVCacheFormatConformance(PluginConformance):
    """Inherit and set the attributes; the tests are inherited.

    Attributes:
        format_name: Name of the format under test, among those the plugin gives.
        dtypes: Activation dtypes to try.
        geometries: (H, D, S) of the two sides; one format object serves both at once.
    """

    format_name: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    geometries: ClassVar[tuple[tuple[int, int, int], tuple[int, int, int]]] = (
        (2, 64, 16),
        (3, 32, 8),
    )

    def kv_format(self) -> KVCacheFormat:
        """The format under test, as the plugin's hook gives it."""
        offered = self.offered("ingle_kv_cache_formats", KVCacheFormat)
        found: KVCacheFormat = next(item for item in offered if item.name == self.format_name)
        return found

    def geometry(self, side: Literal["k", "v"], dtype: torch.dtype) -> KVCacheGeometry:
        """The shape of one side."""
        heads, dim, block = self.geometries["kv".index(side)]
        return KVCacheGeometry(
            side=side, num_kv_heads=heads, head_dim=dim, block_size=block, dtype=dtype
        )

    def cases(self, num_blocks: int = NUM_BLOCKS) -> Iterator[CacheCase]:
        """A store per dtype and side; both sides are allocated before either is used."""
        for dtype in self.dtypes:
            format_ = self.kv_format()
            geometries = [self.geometry("k", dtype), self.geometry("v", dtype)]
            stores = [format_.allocate(g, num_blocks, self.device) for g in geometries]
            # Fresh storage may hold anything, and NaN is not equal to itself.
            for tensor in (t for store in stores for t in store.tensors().values()):
                tensor.zero_()
            name = str(dtype).removeprefix("torch.")
            for store in stores:
                case = CacheCase(
                    label=f"{store.geometry.side}, {name}",
                    format=format_,
                    store=store,
                    bound=format_.max_relative_error[name],
                )
                format_.observe(store, case.values(64, seed=7))
                yield case

    def test_a_store_knows_what_it_was_allocated_for(self) -> None:
        for case in self.cases():
            assert case.store.num_blocks == NUM_BLOCKS
            assert case.geometry == self.geometry(case.geometry.side, case.geometry.dtype)

    def test_what_is_written_comes_back_within_the_bound(self) -> None:
        for case in self.cases():
            x = case.values(case.num_slots)
            case.write(x, torch.arange(case.num_slots))
            found = case.read()
            assert found.dtype is case.geometry.dtype, case.label
            error = relative_error(found, x)
            assert error <= case.bound, f"{case.label}: off by {error:.2g}"

    def test_scattered_slots_hold_what_was_written_to_them(self) -> None:
        for case in self.cases():
            slots = torch.randperm(case.num_slots, generator=torch.Generator().manual_seed(3))
            x = case.values(case.num_slots)
            for start in range(0, case.num_slots, 7):
                case.write(x[start : start + 7], slots[start : start + 7])
            assert relative_error(case.read()[slots], x) <= case.bound, case.label

    def test_a_sequence_of_scattered_blocks_is_read_in_order(self) -> None:
        for case in self.cases():
            block = case.geometry.block_size
            table = torch.tensor([5, 2, 7])
            slots = (table[:, None] * block + torch.arange(block)).flatten()
            x = case.values(len(slots))
            case.write(x, slots)
            for length in (1, block, block + 1, 3 * block - 1):
                found = case.format.gather(case.store, table, length)
                heads, dim = case.geometry.num_kv_heads, case.geometry.head_dim
                assert found.shape == (heads, length, dim), case.label
                error = relative_error(found.transpose(0, 1), x[:length])
                assert error <= 2 * case.bound, f"{case.label}: off by {error:.2g}"

    def test_a_slot_written_twice_keeps_the_last(self) -> None:
        for tokens, spread in ((5, 2), (LARGE_TOKENS, 60)):
            for case, twin in zip(self.cases(), self.cases(), strict=True):
                generator = torch.Generator().manual_seed(4)
                slots = torch.randint(spread, (tokens,), generator=generator)
                x = case.values(tokens)
                last = {int(slot): index for index, slot in enumerate(slots)}
                with torch_threads(4):
                    case.write(x, slots)
                twin.write(x[list(last.values())], torch.tensor(list(last)))
                assert torch.equal(case.read(), twin.read()), f"{case.label}, {tokens} tokens"

    def test_neighbours_keep_their_bits(self) -> None:
        for case in self.cases():
            case.write(case.values(case.num_slots), torch.arange(case.num_slots))
            before = case.read().clone()
            slots = torch.tensor([3, case.geometry.block_size, case.num_slots - 1])
            case.write(case.values(3, seed=2), slots)
            after = case.read()
            others = torch.ones(case.num_slots, dtype=torch.bool).index_fill(0, slots, False)
            assert torch.equal(after[others], before[others]), case.label
            assert not torch.equal(after[slots], before[slots]), case.label

    def test_the_input_may_be_strided_and_is_left_alone(self) -> None:
        for case in self.cases():
            x = case.values(4)
            wide = torch.zeros(4, 3 * x[0].numel(), dtype=x.dtype)
            strided = wide[:, 5 : 5 + x[0].numel()].view(x.shape)
            strided.copy_(x)
            before = wide.clone()
            case.write(strided, torch.arange(4))
            assert torch.equal(wide, before), f"{case.label}: wrote to its input"
            assert relative_error(case.read()[:4], x) <= 2 * case.bound, case.label

    def test_writing_nothing_changes_nothing(self) -> None:
        for case in self.cases():
            before = case.read().clone()
            case.write(case.values(0), torch.empty(0, dtype=torch.int64))
            assert torch.equal(case.read(), before), case.label

    def test_a_store_takes_the_bytes_it_declares(self) -> None:
        for case in self.cases():
            tensors = case.store.tensors().values()
            taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            declared = case.format.bytes_per_block(case.geometry) * NUM_BLOCKS
            assert taken == declared, case.label

    def test_its_size_is_told_from_the_size_of_the_dtype_alone(self) -> None:
        for case in self.cases():
            dtype = cast("torch.dtype", SimpleNamespace(itemsize=case.geometry.dtype.itemsize))
            planned = case.format.bytes_per_block(replace(case.geometry, dtype=dtype))
            assert planned == case.format.bytes_per_block(case.geometry), case.label

    def test_copying_a_block_of_every_tensor_copies_its_tokens(self) -> None:
        for case in self.cases():
            case.write(case.values(case.num_slots), torch.arange(case.num_slots))
            before = case.read().clone()
            for tensor in case.store.tensors().values():
                assert tensor.shape[0] == NUM_BLOCKS, f"{case.label}: dimension 0 is the block"
                tensor[6].copy_(tensor[1])
            block = case.geometry.block_size
            after = case.read()
            assert torch.equal(after[6 * block : 7 * block], before[block : 2 * block])
            assert torch.equal(after[: 6 * block], before[: 6 * block]), case.label

    def test_a_view_is_what_gather_gives_and_lies_in_the_store(self) -> None:
        for case in self.cases():
            case.write(case.values(case.num_slots), torch.arange(case.num_slots))
            length = 2 * case.geometry.block_size + 3
            view = case.format.view(case.store, 4, length)
            if view is None:
                continue
            table = torch.arange(4, NUM_BLOCKS)
            gathered = case.format.gather(case.store, table, length)
            assert torch.equal(view, gathered), case.label
            case.write(case.values(1, seed=9), torch.tensor([4 * case.geometry.block_size]))
            assert not torch.equal(view, gathered), f"{case.label}: a view must not be a copy"

    def test_what_is_gathered_as_stored_is_what_gather_gives_turned(self) -> None:
        for case in self.cases():
            x = case.values(case.num_slots)
            case.write(x, torch.arange(case.num_slots))
            table = torch.tensor([2, 5, 3])
            length = 3 * case.geometry.block_size - 1
            found = case.format.gather_stored(case.store, table, length)
            assert found.dtype is case.geometry.dtype, case.label
            wanted = case.format.gather(case.store, table, length).float()
            turn = case.store.rotation
            if turn is not None:
                eye = torch.eye(turn.shape[0])
                assert relative_error(turn @ turn.T, eye) < 1e-5, f"{case.label}: not orthogonal"
                wanted = wanted @ turn
            error = relative_error(found, wanted)
            assert error <= 4 * torch.finfo(found.dtype).eps, f"{case.label}: off by {error:.2g}"

    def test_both_sides_are_kept_apart(self) -> None:
        cases = list(self.cases())
        for k, v in zip(cases[::2], cases[1::2], strict=True):
            before = v.read().clone()
            k.write(k.values(k.num_slots), torch.arange(k.num_slots))
            assert torch.equal(v.read(), before), k.label

    def test_it_does_not_claim_checkpoints_that_ask_for_nothing(self) -> None:
        for kind, info in FOREIGN_CHECKPOINTS.items():
            assert self.kv_format().detect(info) is None, f"it claims {kind}"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch with that many threads, whatever the machine or the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
