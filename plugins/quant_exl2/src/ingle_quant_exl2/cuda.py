"""EXL2 on CUDA: the Triton kernel for a few rows, decode and multiply for more, one layout.

Letters: N output features as stored, K input features, R rows of activations, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ingle.plugin import (
    DeviceInfo,
    Epilogue,
    KernelUse,
    LinearWeight,
    MatmulKernel,
    PluginError,
    Support,
)
from ingle.plugin.launches import TunedLaunches
from ingle_quant_exl2.kernel import (
    MAX_ROWS,
    MAX_TILES,
    Exl2Config,
    exl2_workspace_bytes,
    matmul_exl2,
)
from ingle_quant_exl2.layout import Layout
from ingle_quant_exl2.layout import Section as Stored
from ingle_quant_exl2.packing import unpack_scale_codes
from ingle_quant_exl2.planes import (
    PackedExl2,
    Section,
    find_sections,
    pack_exl2,
    plan_splits,
    section_codes,
)
from ingle_quant_exl2.tuning import Exl2Launch, exl2_launches, exl2_product, matrix_key
from ingle_quant_exl2.weight import COLUMN_UNIT, Exl2Weight, StoredExl2Weight

DTYPES = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)
"""Compute capability from which tensor cores take 16 x 8 x 16 tiles and bfloat16."""
TILE = 16
"""Output features of a row tile of ``PackedExl2.words``."""
PACK_ELEMENTS = 1 << 24
"""Codes packed at a time: int32 copies of more would not fit beside a model on a small card."""


@dataclass(kw_only=True, eq=False)
class PlanesExl2Weight(Exl2Weight):
    """A matrix as ``planes.py`` lays it out; the exact scales of the format stay beside it.

    Attributes:
        words, scale_codes, group_scale, work, sections: As in ``PackedExl2``.
        launch: How few rows are launched; ``work`` is dealt for it.
    """

    words: torch.Tensor
    scale_codes: torch.Tensor
    group_scale: torch.Tensor
    work: torch.Tensor
    sections: tuple[Section, ...]
    launch: Exl2Launch

    @property
    def packed(self) -> PackedExl2:
        """What the kernel takes."""
        return PackedExl2(
            words=self.words,
            scale_codes=self.scale_codes,
            group_scale=self.group_scale,
            sections=self.sections,
            out_features=self.stored_out_features,
            in_features=self.in_features,
            work=self.work,
        )

    def codes(self, section: Stored, start: int, stop: int) -> torch.Tensor:
        """Unpacked from the planes of the tiles that hold outputs ``start:stop``."""
        words = self.words[start // TILE : -(-stop // TILE)]
        inside = [s for s in self.sections if section.start <= s.start < section.stop]
        codes = torch.cat([section_codes(words, s).to(torch.uint8) for s in inside], 1)
        first = start % TILE
        return codes[first : first + stop - start].T


def groups_of(layout: Layout) -> tuple[list[int], list[int]]:
    """Bits and rows of each group."""
    return [g.bits for g in layout.groups], [g.rows for g in layout.groups]


def to_planes(
    weight: StoredExl2Weight, choose: Callable[[PackedExl2], Exl2Launch]
) -> PlanesExl2Weight:
    """The same matrix in the kernel's layout, packed some outputs at a time; ``choose`` says how it
    is launched."""
    packed = _packed(weight)
    launch = choose(packed)
    planned = plan_splits(packed, launch.splits)
    return PlanesExl2Weight(
        in_features=weight.in_features,
        out_features=weight.out_features,
        stored_out_features=weight.stored_out_features,
        dtype=weight.dtype,
        layout=weight.layout,
        q_scale=weight.q_scale,
        q_scale_max=weight.q_scale_max,
        input_order=weight.input_order,
        words=planned.words,
        scale_codes=planned.scale_codes,
        group_scale=planned.group_scale,
        work=planned.work,
        sections=planned.sections,
        launch=launch,
    )


def _packed(weight: StoredExl2Weight) -> PackedExl2:
    step = max(1, PACK_ELEMENTS // (weight.in_features * COLUMN_UNIT)) * COLUMN_UNIT
    stop = weight.stored_out_features
    parts = [_pack(weight, n, min(n + step, stop)) for n in range(0, stop, step)]
    return PackedExl2(
        words=torch.cat([part.words for part in parts]),
        scale_codes=torch.cat([part.scale_codes for part in parts], 1),
        group_scale=parts[0].group_scale,
        sections=parts[0].sections,
        out_features=stop,
        in_features=weight.in_features,
        work=parts[0].work,
    )


def _pack(weight: StoredExl2Weight, start: int, stop: int) -> PackedExl2:
    codes = torch.cat([weight.codes(section, start, stop) for section in weight.layout.sections])
    scale_codes = unpack_scale_codes(weight.q_scale[:, start // 8 : stop // 8])
    # Rounded to float16 after the division, as the format does it.
    largest = (weight.q_scale_max.float() / 256).half()
    return pack_exl2(codes.T, scale_codes, largest, groups_of(weight.layout))


class Exl2CudaKernel(MatmulKernel):
    """Float16 and bfloat16 on cards from compute capability 8.0 on.

    Up to 32 rows go through the Triton kernel, which reads every code once. More are bound by
    arithmetic: the same bytes are decoded, some outputs at a time, for torch's product.
    """

    name: ClassVar[str] = "exl2_triton"
    priority: ClassVar[int] = 20
    epilogues: ClassVar[frozenset[str]] = frozenset({"add"})

    def __init__(self, device: DeviceInfo) -> None:
        self._num_sms = multi_processors(device)
        self._tuned = TunedLaunches(device)

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """What fits the packed layout."""
        if not isinstance(weight, Exl2Weight):
            return Support(ok=False, reason="not an EXL2 weight")
        if use.device.type != "cuda":
            return Support(ok=False, reason="only on CUDA")
        if use.device.capability is None or use.device.capability < OLDEST:
            return Support(ok=False, reason=f"compute capability {use.device.capability} < 8.0")
        if use.dtype not in DTYPES:
            return Support(ok=False, reason=f"only float16 and bfloat16, not {use.dtype}")
        if isinstance(weight, PlanesExl2Weight):
            return Support(ok=True, reason="packed for Triton; decoded for more than 32 rows")
        if not isinstance(weight, StoredExl2Weight):
            return Support(ok=False, reason=f"packed for another kernel: {type(weight).__name__}")
        if weight.stored_out_features > MAX_TILES * Exl2Config().block_n:
            return Support(ok=False, reason=f"{weight.stored_out_features} outputs are too many")
        try:
            find_sections(*groups_of(weight.layout))
        except ValueError as error:
            return Support(ok=False, reason=str(error))
        return Support(ok=True, reason="one launch for all widths of a matrix")

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Cuts codes into planes in fragment order, once."""
        return to_planes(weight, self._launch) if isinstance(weight, StoredExl2Weight) else weight

    def _launch(self, packed: PackedExl2) -> Exl2Launch:
        choices = exl2_launches(packed, self._num_sms)
        return self._tuned.get(matrix_key(packed), choices) or choices[0]

    def tune(self, weight: LinearWeight, dtype: torch.dtype) -> str:
        """Measures launches with one row, and keeps the fastest for later starts."""
        if not isinstance(weight, PlanesExl2Weight):
            return ""
        packed, choices = weight.packed, exl2_launches(weight.packed, self._num_sms)
        product = exl2_product(packed, self._tuned.device, dtype, choices[0])
        return self._tuned.tune(matrix_key(packed), choices, product.seconds)

    def workspace_bytes(self, weight: LinearWeight, max_rows: int) -> int:
        """Counters and partial sums of the split along K."""
        if not isinstance(weight, PlanesExl2Weight):
            return 0
        return exl2_workspace_bytes(weight.packed, min(max_rows, MAX_ROWS))

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]``, in the weight's input order, times the weight: [R, N] in x's dtype."""
        if not isinstance(weight, PlanesExl2Weight):
            raise PluginError(f"kernel {self.name} was given a {type(weight).__name__}.")
        rows = x.shape[0]
        y = out
        if y is None or not y.is_contiguous():
            y = x.new_empty(rows, weight.stored_out_features)
        residual = None if epilogue is None else epilogue.residual
        if rows > MAX_ROWS:
            _decoded_product(x, weight, y)
            if residual is not None:
                y += residual
        elif rows:
            residual = None if residual is None else residual.contiguous()
            config = weight.launch.config
            matmul_exl2(x, weight.packed, config, out=y, workspace=workspace, residual=residual)
        return y if out is None or out is y else out.copy_(y)


def multi_processors(device: DeviceInfo) -> int:
    """The card's multiprocessors; a common number where nobody knows them."""
    return device.multi_processors or 128


def _decoded_product(x: torch.Tensor, weight: PlanesExl2Weight, out: torch.Tensor) -> None:
    chunks = weight.column_chunks()
    for start in chunks:
        stop = min(start + chunks.step, weight.stored_out_features)
        torch.mm(x, weight.columns(start, stop, x.dtype), out=out[:, start:stop])
