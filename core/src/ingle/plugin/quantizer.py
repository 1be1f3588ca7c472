"""The contract for making quants: a format's quantizer is lent one block of the model at a time.

Core owns the loop over blocks, the calibration rows and the files; a quantizer turns one block's
weights into the tensors its format stores.

Shape letters: N output features, K input features, E hidden size, T tokens, L tokens of a row of
calibration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

BlockPart = Literal["attention", "feed_forward", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSource:
    """What gives a linear's input, in so far as a factor per input can be moved into it.

    Attributes:
        norm: Name of the tensor of the norm whose output is the input, or None.
        norm_offset: What the model adds to that tensor before multiplying with it.
        linear: Name of the linear whose outputs reach the input one to one, or None.
        rows: First output row of ``linear`` that does, and one past the last.
    """

    norm: str | None = None
    norm_offset: float = 0.0
    linear: str | None = None
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSite:
    """Linears of a block that read the same input.

    Attributes:
        names: Their checkpoint names, in the order the model joins them.
        part: The part of the block they are in.
        source: What gives the input; None: nothing that a factor could be moved into.
        quantizable: Whether they are to be quantised; routers of experts are not.
    """

    names: tuple[str, ...]
    part: BlockPart
    source: InputSource | None = None
    quantizable: bool = True


class QuantizerBlock(Protocol):
    """One decoder block, or the output head, in float32 on the device; core's, lent.

    Attributes:
        name: ``model.layers.3``, or ``lm_head``.
        index: Its place, the head after the last block.
        num_blocks: Decoder blocks of the model.
        sites: Its linears by the input they read, in the order they are computed.
        row_length: L; 0 without calibration.
        hidden: The calibration rows as they enter the block: float32 [T, E] on the CPU, or None
            without calibration. Not to be written in place.
    """

    name: str
    index: int
    num_blocks: int
    sites: tuple[LinearSite, ...]
    row_length: int
    hidden: torch.Tensor | None

    def weight(self, name: str) -> torch.Tensor:
        """The weight of linear ``name`` that the block computes with: float32 [N, K]. Not to be
        written in place."""
        ...

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        """Lets the block compute with ``weight`` from now on."""
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """A norm or a bias of the block by its checkpoint name, float32, or None."""
        ...

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces a norm or a bias, in the block and in what is written."""
        ...

    def observe(
        self,
        see: Callable[[LinearSite, torch.Tensor], None],
        last: LinearSite | None = None,
    ) -> None:
        """Runs all calibration rows through the block as it is now, some rows at a time.

        What is computed after site ``last`` is left out where that is given.

        ``see(site, x)`` is called with each site's input, float32 [T, K], rows in the same order
        for every site; T is a multiple of L except for experts, which see their own tokens.
        """
        ...

    def run_part(self, part: BlockPart, x: torch.Tensor) -> torch.Tensor:
        """The output of a part before it joins the residual, for its first site's input ``x``
        float32 [T, E]; T must be a multiple of L for attention."""
        ...


Tensors = Mapping[str, "torch.Tensor"]


class Quantizer(ABC):
    """Makes one quant. Built by ``WeightFormat.make_quantizer`` for one run.

    Everything it remembers between blocks must come from ``measure_block`` by way of ``plan``, or
    a run that was interrupted would not give the same bytes.

    Attributes:
        calibrated: Whether it observes blocks; core prepares calibration rows only then.
        measures: Whether a first pass over all blocks with ``measure_block`` is needed.
        carry: Which outputs the next block is fed with: those of the block as it is after
            ``quantize_block`` (``quantized``), or as it was before (``original``).
        file_stem: What weight files are called, before their number.
        dense_dtype: How tensors that are not quantised are stored: as they are (``source``), or
            in ``float16`` where readers of the format take nothing else.
    """

    calibrated: bool = True
    measures: bool = False
    carry: ClassVar[Literal["quantized", "original"]] = "quantized"
    file_stem: ClassVar[str] = "model"
    dense_dtype: ClassVar[Literal["source", "float16"]] = "source"

    def measure_block(self, block: QuantizerBlock) -> Mapping[str, Any]:
        """What the first pass learns about a block (or the head), as a JSON object. The block's
        own outputs, unquantised, are carried on."""
        return {}

    def plan(self, measurements: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Called once, before the first ``quantize_block``, with what every block gave in order;
        empty when ``measures`` is False."""

    @abstractmethod
    def quantize_block(self, block: QuantizerBlock) -> Mapping[str, Tensors]:
        """The tensors that stand for quantised linears: linear name -> suffix -> tensor.

        ``{"model.layers.0.mlp.up_proj": {"qweight": ..., "scales": ...}}``. Linears that are left
        out are written dense, as the block has them; a ``bias`` beside the other suffixes stands
        for the block's own. With ``carry = "quantized"`` it also puts the
        dequantised weights into the block.
        """

    def quantize_head(self, head: QuantizerBlock) -> Mapping[str, Tensors]:
        """The same for the output head; by default it stays as it is. A head that shares the
        embedding's tensor becomes one of its own when it is quantised."""
        return {}

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The ``quantization_config`` of the output. Core adds what it knows of the calibration
        under ``meta`` where the quantizer leaves room for it."""

    def files(self) -> Mapping[str, str]:
        """Other text files of the output, by name."""
        return {}

    def summary(self) -> str:
        """One line for the model card: what was done, in words."""
        return ""
