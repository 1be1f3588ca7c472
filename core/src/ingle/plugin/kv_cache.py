"""The contract for KV-cache formats: how one side (keys or values) of one layer is stored.

Shape letters: T tokens, H key/value heads, D head size, B blocks, S tokens in a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ingle.plugin.checkpoint import CheckpointInfo, Detection, TensorReader

if TYPE_CHECKING:
    import torch

    from ingle.plugin.device import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGeometry:
    """The shape of one side of one layer's cache.

    Attributes:
        side: ``"k"`` or ``"v"``.
        num_kv_heads: H on this rank.
        first_kv_head: Index of this rank's first head in the whole model.
        head_dim: D.
        block_size: S, tokens per block.
        dtype: torch dtype of what is written and of what ``gather`` gives back. Where a plan is
            made and no plugin has loaded torch, it has nothing but its ``itemsize``.
    """

    side: Literal["k", "v"]
    num_kv_heads: int
    first_kv_head: int = 0
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSide:
    """One side of one layer as its format's ``triton_read`` and ``triton_write`` are given it.

    Attributes:
        tensors: ``T``: the storage, and whatever else they need.
        meta: ``META``: hashable constants; the kernel is compiled anew for each.
        write_meta: ``META`` of ``triton_write`` where it is another; None: ``meta``.
        write_turns: Whether ``triton_write`` multiplies by the store's ``rotation`` itself. If not,
            a store that has one is written by ``KVCacheFormat.write``.
    """

    tensors: tuple[torch.Tensor, ...]
    meta: tuple[Any, ...] = ()
    write_meta: tuple[Any, ...] | None = None
    write_turns: bool = False


Rows = tuple["torch.Tensor", ...]
"""What belongs together of several tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSide:
    """One side of one layer on a CPU as compiled decode steps read and write it. They are made by
    torch's compiler from two functions at the top of a module, whose source is part of the name
    under which the result is kept.

    Attributes:
        tensors: The storage, each [H, B, S, ...] and contiguous; written in place.
        constants: What else the functions read.
        read: ``read(stored, constants)``: of each tensor [H, N, S, ...] to float32 [H, N, S, D].
        write: ``write(row, constants)``: a token [H, D] in the activation dtype to what goes into
            each tensor, [H, ...].
    """

    tensors: Rows
    constants: Rows = ()
    read: Callable[[Rows, Rows], torch.Tensor]
    write: Callable[[torch.Tensor, Rows], Rows]


def read_plain(stored: Rows, constants: Rows) -> torch.Tensor:
    """``CompiledSide.read`` of numbers kept as they are."""
    return stored[0].float()


def write_plain(row: torch.Tensor, constants: Rows) -> Rows:
    """``CompiledSide.write`` of numbers kept as they are."""
    return (row,)


class KVStore(ABC):
    """The storage of one side of one layer, made by ``KVCacheFormat.allocate``.

    Attributes:
        geometry: What it was allocated for.
        num_blocks: B, the null block 0 included.
        rotation: An orthogonal matrix R, float32 [D, D], when what is stored stands for ``x @ R``;
            None: for ``x``. Whoever reads the storage in place, or through ``gather_stored``,
            multiplies queries by a key's R, and what comes out by the transpose of a value's;
            ``gather`` and ``view`` give ``x``. ``observe`` is the last that may set it.
    """

    geometry: KVCacheGeometry
    num_blocks: int
    rotation: torch.Tensor | None = None

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor that holds cached data. Dimension 0 of each is the block, so that core can
        copy, move and count blocks. Per-layer constants (scales) are not among them."""

    def paged(self) -> PagedSide | None:
        """What the format's Triton functions read and write in place; None: core gathers."""
        return None

    def compiled(self) -> CompiledSide | None:
        """What compiled decode steps on a CPU read and write in place; None: they are given copies
        of what the format reads."""
        return None


class KVCacheFormat(ABC):
    """Stores keys or values. One object serves every layer and both sides.

    Attributes:
        name: What users type after ``--kv-cache-dtype``; also in ``k=NAME,v=NAME``.
        aliases: Other spellings.
        max_relative_error: Largest error of write then gather on standard normal data, by dtype
            name, as relative Frobenius norm.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    max_relative_error: ClassVar[Mapping[str, float]]

    @property
    def triton_read(self) -> Callable[..., Any] | None:
        """Reads a tile inside core's attention on CUDA, a ``@triton.jit`` function, or None:

            read(T, block, head, tok, dim, mask, PAGE, D, META, DTYPE) -> (tile, gain)

        ``T`` and ``META`` are a ``PagedSide``'s. ``block`` int64 is a number, or one per token
        [1, N]; ``head`` a number; ``tok`` int32 [1, N] places in the block; ``dim`` int32 [DP, 1]
        with DP the power of two from D on; ``mask`` [DP, 1] is where ``dim`` is below D, None when
        DP is D. ``tile`` [DP, N] is of ``DTYPE``, the activations', and 0 where masked. ``gain`` is
        a factor that the tile lacks: a float32 number, the same for a whole head, or for keys
        also one per token, [1, N].
        """
        return None

    @property
    def triton_write(self) -> Callable[..., Any] | None:
        """Encodes and stores a tile on CUDA, a ``@triton.jit`` function, or None:

            write(T, block, head, tok, dim, x, mask, PAGE, D, META)

        Letters as for ``triton_read``; ``x`` float32 [DP, N] is 0 where ``dim`` is not below D,
        and ``mask`` [DP, N] says what to store.
        """
        return None

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """A claim that this checkpoint asks for this cache type, or None."""
        return None

    @abstractmethod
    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        """Bytes one block takes, scales included; need not follow any torch dtype. Of
        ``geometry.dtype`` only the ``itemsize`` counts."""

    @abstractmethod
    def allocate(self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo) -> KVStore:
        """Storage for ``num_blocks`` blocks, block 0 (the null block) included."""

    def load_scales(self, store: KVStore, layer_name: str, reader: TensorReader) -> bool:
        """Takes this layer's scales from the checkpoint; returns whether there were any.

        ``layer_name`` is the attention module's checkpoint name:
        ``model.layers.0.self_attn``.
        """
        return False

    def observe(self, store: KVStore, x: torch.Tensor) -> None:  # noqa: B027 - optional
        """Sees ``x [T, H, D]`` once, before anything is stored, to measure scales."""

    @abstractmethod
    def write(self, store: KVStore, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores ``x [T, H, D]`` at slots ``slot_mapping`` (int64 [T], slot = block * S + offset).

        A slot that occurs twice ends as if only its last occurrence had been written. Other
        slots keep their bits.
        """

    @abstractmethod
    def gather(self, store: KVStore, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """The first ``seq_len`` tokens of a sequence with blocks ``block_table`` (int64 [B']):
        [H, seq_len, D] in ``geometry.dtype``. The reference read, on any device."""

    def gather_stored(
        self, store: KVStore, block_table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """As ``gather``, but ``x @ R`` where the store has a ``rotation``: turning queries takes
        less time than turning every cached token back."""
        found = self.gather(store, block_table, seq_len)
        turn = store.rotation
        return found if turn is None else (found.float() @ turn).to(found.dtype)

    def view(self, store: KVStore, first_block: int, num_tokens: int) -> torch.Tensor | None:
        """``num_tokens`` tokens from the start of ``first_block`` on, *in place*: [H, T, D].

        ``num_tokens`` may exceed one block: core calls it for runs of consecutive block numbers.
        None when the layout does not allow it; core then gathers.
        """
        return None
