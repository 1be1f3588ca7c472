"""Four-bit normal floats in blocks of 64, as a stranger would add a format of no known kind: a
loader, a reference and a ten-line decode function, which gives it core's products on a card.

``NAME.nf4_codes`` uint8 [N, K/2], input 2i low; ``NAME.nf4_absmax`` float16 [N, K/64].
Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch

from ingle.plugin import (
    CheckpointError,
    CheckpointInfo,
    ConfigError,
    Detection,
    LinearSpec,
    LinearWeight,
    Quantizer,
    QuantizerBlock,
    TensorReader,
    TritonDecode,
    WeightFormat,
    WeightLoader,
)

BLOCK = 64
CODEBOOK = tuple(
    float(x)
    for x in (
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    )
)
"""Quantiles of the standard normal distribution, scaled to one (Dettmers et al., QLoRA)."""


@dataclass(kw_only=True, eq=False)
class Nf4Weight(LinearWeight):
    """Codes and the largest magnitude of each block."""

    in_features: int
    out_features: int
    stored_out_features: int
    codes: torch.Tensor
    absmax: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        nibbles = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).long()
        values = torch.tensor(CODEBOOK, device=self.codes.device)[nibbles]
        return values * self.absmax.float().repeat_interleave(BLOCK, 1)

    @property
    def triton(self) -> TritonDecode | None:
        """How core's kernels decode it, where triton is installed."""
        if find_spec("triton") is None:
            return None
        from ingle_quant_nf4_decode import decode_nf4

        book = torch.tensor(CODEBOOK, device=self.codes.device)
        tensors = (self.codes, self.absmax, book)
        sections = ((0, self.in_features, (BLOCK,)),)
        return TritonDecode(fn=decode_nf4, tensors=tensors, sections=sections, tile=(1, 1))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Both."""
        return {"codes": self.codes, "absmax": self.absmax}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy around others."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Options:
    """How normal floats are made.

    Attributes:
        reach: Share of a block's largest magnitude that its largest code stands for.
        calibrated: Weighs inputs by what the calibration shows of them.
    """

    reach: float = 1.0
    calibrated: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.reach <= 1:
            raise ConfigError(f"--reach must be above 0 and at most 1, got {self.reach}.")


class Nf4Quantizer(Quantizer):
    """Every weight to the nearest value of the code book."""

    def __init__(self, options: Nf4Options) -> None:
        self.options = options
        self.calibrated = options.calibrated

    def quantize_block(self, block: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The block's linears."""
        seen: list[str] = []
        if self.calibrated:
            block.observe(lambda site, x: seen.extend(site.names))
        names = [name for site in block.sites if site.quantizable for name in site.names]
        assert not self.calibrated or set(names) <= set(seen)
        return {name: self._pack(block, name) for name in names}

    def _pack(self, block: QuantizerBlock, name: str) -> dict[str, torch.Tensor]:
        blocks = block.weight(name).unflatten(1, (-1, BLOCK))
        absmax = (blocks.abs().amax(2) * self.options.reach).half()
        shares = blocks / absmax.float().clamp(min=1e-8).unsqueeze(2)
        book = torch.tensor(CODEBOOK, device=blocks.device)
        middles = (book[1:] + book[:-1]) / 2
        codes = torch.bucketize(shares.contiguous(), middles).flatten(1).to(torch.uint8)
        values = book[codes.long()] * absmax.float().repeat_interleave(BLOCK, 1)
        block.set_weight(name, values)
        return {"nf4_codes": codes[:, 0::2] | codes[:, 1::2] << 4, "nf4_absmax": absmax}

    def config(self) -> Mapping[str, Any]:
        """A block of our own."""
        return {"quant_method": "nf4-blocks", "block": BLOCK}

    def summary(self) -> str:
        """What was done."""
        return "Normal floats in blocks of 64."


class Nf4Format(WeightFormat):
    """Recognised by its tensors alone."""

    name: ClassVar[str] = "nf4-blocks"
    quantizer_options: ClassVar[type[Any] | None] = Nf4Options

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """When any tensor is named as ours are."""
        count = sum(name.endswith(".nf4_codes") for name in info.tensor_names)
        return Detection(reason=f"{count} linears with .nf4_codes", priority=10) if count else None

    def open(self, info: CheckpointInfo) -> WeightLoader:
        """A loader for all of them."""
        return Nf4Loader(info)

    def make_quantizer(self, options: Any, source: CheckpointInfo) -> Quantizer:
        """Makes such checkpoints, too."""
        return Nf4Quantizer(options)


class Nf4Loader(WeightLoader):
    """Reads them whole."""

    def __init__(self, info: CheckpointInfo) -> None:
        suffix = ".nf4_codes"
        self._shapes = {
            name.removesuffix(suffix): (shape[0], 2 * shape[1])
            for name, shape in info.tensor_shapes.items()
            if name.endswith(suffix)
        }

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """name -> (N, K)."""
        return self._shapes

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """Codes and magnitudes."""
        return f"{name}.nf4_codes", f"{name}.nf4_absmax"

    def packed_bytes(self, name: str) -> int:
        """Half a byte a weight and two a block."""
        n, k = self._shapes[name]
        return n * k // 2 + 2 * n * (k // BLOCK)

    def load_linear(self, spec: LinearSpec, reader: TensorReader) -> LinearWeight:
        """One linear."""
        n, k = self._shapes[spec.name]
        absmax = reader.get(f"{spec.name}.nf4_absmax")
        if (n, k) != (spec.out_features, spec.in_features) or absmax.shape != (n, k // BLOCK):
            raise CheckpointError(
                f"tensor {spec.name}.nf4_codes: wanted [{spec.out_features}, "
                f"{spec.in_features // 2}] and magnitudes [{n}, {k // BLOCK}], found "
                f"[{n}, {k // 2}] and {list(absmax.shape)}"
            )
        return Nf4Weight(
            in_features=k,
            out_features=n,
            stored_out_features=n,
            codes=reader.get(f"{spec.name}.nf4_codes").clone(),
            absmax=absmax.clone(),
        )
