"""Makes a quant: one block of the model after another, from the original to files on disk.

Shape letters: T tokens of calibration, E hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ingle.checkpoint.model_config import ModelConfig
from ingle.checkpoint.safetensors import Checkpoint
from ingle.errors import CheckpointError
from ingle.model.decoder import look_up
from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.device import DeviceInfo
from ingle.plugin.quantizer import Quantizer, Tensors
from ingle.quantize.block import EMBEDDING, HEAD, BlockShape, HeadBlock, LayerBlock, LentBlock
from ingle.quantize.calibration import Calibration
from ingle.quantize.progress import MEASURE, Progress
from ingle.quantize.tensor_file import write_tensors

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model that is quantised.

    Attributes:
        checkpoint: Its tensors.
        info: Its headers.
        config: Its shape.
        device: Where blocks are computed.
    """

    checkpoint: Checkpoint
    info: CheckpointInfo
    config: ModelConfig
    device: DeviceInfo


@dataclass(slots=True, kw_only=True)
class QuantizeRun:
    """One run over all blocks.

    Attributes:
        source: The model.
        quantizer: The format's.
        calibration: The rows, or None when the quantizer needs none.
        progress: What is done, on disk.
        out: The output folder.
    """

    source: Source
    quantizer: Quantizer
    calibration: Calibration | None
    progress: Progress
    out: Path
    bar: tqdm[None] = field(init=False)

    def run(self) -> None:
        """Both passes, from where an earlier run stopped. Files are whole once it returns."""
        blocks = self.source.config.num_layers + 1
        passes = 2 if self.quantizer.measures else 1
        measuring = self.progress.stage == MEASURE
        done = self.progress.next_block + (blocks if passes == 2 and not measuring else 0)
        with tqdm(
            total=blocks * passes,
            initial=done,
            desc="Quantizing",
            unit="block",
            disable=not sys.stderr.isatty(),
        ) as self.bar:
            if measuring:
                self._pass(self._measure)
                self.progress.begin_quantizing()
            self.quantizer.plan(self.progress.measurements)
            self._pass(self._quantize)

    def _pass(self, work: Callable[[LentBlock], None]) -> None:
        if self.progress.next_block > self.source.config.num_layers:
            return
        hidden = self.progress.hidden()
        if hidden is None and self.calibration is not None:
            hidden = self._embed(self.calibration)
        for index in range(self.progress.next_block, self.source.config.num_layers + 1):
            block = self._block(index)
            block.hidden = hidden
            work(block)
            hidden = block.outputs
            self.bar.update()

    def _block(self, index: int) -> LentBlock:
        length = len(self.calibration.rows[0]) if self.calibration is not None else 0
        shape = BlockShape(config=self.source.config, device=self.source.device, row_length=length)
        if index == self.source.config.num_layers:
            return HeadBlock(self.source.checkpoint, shape)
        return LayerBlock(self.source.checkpoint, index, shape)

    def _embed(self, calibration: Calibration) -> torch.Tensor:
        """The rows as they enter the first block: float32 [T, E]."""
        ids = torch.tensor(calibration.rows, dtype=torch.int64).flatten()
        hidden = look_up(self.source.checkpoint.get(EMBEDDING), ids).float()
        return hidden * self.source.config.scales.embedding_multiplier

    def _measure(self, block: LentBlock) -> None:
        measured = self.quantizer.measure_block(block)
        if isinstance(block, LayerBlock) and block.outputs is None and block.hidden is not None:
            block.outputs = block.compute()
        self.progress.measurements.append(dict(measured))
        self.progress.finish_block(block.outputs, {})

    def _quantize(self, block: LentBlock) -> None:
        if isinstance(block, HeadBlock):
            packed = self.quantizer.quantize_head(block)
        else:
            packed = self.quantizer.quantize_block(block)
            self._carry_on(block)
        tensors = {f"{name}.{k}": t for name, parts in packed.items() for k, t in parts.items()}
        tensors.update(self._dense(block, packed))
        file = self._file_name(block.index)
        write_tensors(self.out / file, tensors)
        sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        self.progress.finish_block(block.outputs, sizes, file)

    def _carry_on(self, block: LentBlock) -> None:
        """Leaves what enters the next block in ``block.outputs``."""
        if block.hidden is None:
            return
        if self.quantizer.carry == "quantized" or block.outputs is None:
            block.outputs = block.compute()

    def _file_name(self, index: int) -> str:
        total = self.source.config.num_layers + 1
        return f"{self.quantizer.file_stem}-{index + 1:05d}-of-{total:05d}.safetensors"

    def _dense(self, block: LentBlock, packed: Mapping[str, Tensors]) -> dict[str, torch.Tensor]:
        """What stays as it is: norms, biases, linears that are not quantised; with the head also
        everything that belongs to no block."""
        left_out = {f"{name}.weight" for name in packed}
        left_out.update(f"{name}.bias" for name, parts in packed.items() if "bias" in parts)
        if isinstance(block, HeadBlock) and block.tied:
            left_out.add(f"{HEAD}.weight")
        tensors = {
            name: self._stored(name, tensor)
            for name, tensor in block.tensors().items()
            if name not in left_out
        }
        if isinstance(block, HeadBlock):
            names = self.source.checkpoint.names()
            rest = [n for n in names if not n.startswith(("model.layers.", "model.norm.", HEAD))]
            read = self.source.checkpoint.get
            tensors.update((name, self._stored(name, read(name))) for name in rest)
        return tensors

    def _stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A dense tensor as it is written: as in the source, in the model's own dtype where it was
        part of a stack there, or in float16 where the format has nothing else.

        Raises:
            CheckpointError: When float16 cannot hold it.
        """
        stored = self.source.info.tensor_dtypes.get(name, "")
        if self.quantizer.dense_dtype == "source":
            default: torch.dtype = getattr(torch, self.source.config.dtype)
            return tensor.to(_DTYPES.get(stored, default)) if tensor.is_floating_point() else tensor
        if not tensor.is_floating_point():
            return tensor
        halved = tensor.half()
        if not bool(halved.isfinite().all()):
            raise CheckpointError(
                f"{name} has values up to {float(tensor.abs().max()):g}; this format stores what "
                "it does not quantise as float16, which ends at 65504. Choose another --format."
            )
        return halved

    def facts(self) -> dict[str, Any]:
        """What is known of the calibration, for the output's config."""
        if self.calibration is None:
            return {"source": "none"}
        return {
            "source": self.calibration.source,
            "rows": len(self.calibration.rows),
            "length": len(self.calibration.rows[0]),
            "digest": self.calibration.digest,
        }
