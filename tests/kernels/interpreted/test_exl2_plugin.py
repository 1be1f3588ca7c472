"""The EXL2 CUDA kernel as a plugin, held to what every kernel is held to, in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from interpreted_device import CARD

from ingle.plugin import DeviceInfo, KernelUse, LinearWeight
from ingle.testing import MatmulKernelConformance
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.plugin import ingle_matmul_kernels
from ingle_quant_exl2.weight import StoredExl2Weight

LAYOUTS = {
    "5 and 4 bit": ((5, 32), (5, 32), (4, 32), (4, 128)),
    "8 and 6 bit with a short tail": ((8, 128), (6, 128), (6, 96)),
    "all widths": ((8, 32), (6, 64), (5, 64), (4, 128), (3, 64), (2, 32)),
}


def random_weight(
    groups: tuple[tuple[int, int], ...], outputs: int, dtype: torch.dtype
) -> StoredExl2Weight:
    generator = torch.Generator().manual_seed(outputs)
    words, pairs = [], []
    for bits, size in groups:
        pairs += [bits, sum(len(part) for part in words)]
        words.append(
            pack_codes(torch.randint(0, 1 << bits, (size, outputs), generator=generator), bits)
        )
    rows = sum(size for _, size in groups)
    scales = torch.randint(0, 16, (len(groups), outputs), generator=generator)
    return StoredExl2Weight(
        in_features=rows,
        out_features=outputs,
        stored_out_features=outputs,
        dtype=dtype,
        layout=parse_layout("lin", pairs, sum(len(part) for part in words), rows),
        q_scale=pack_scale_codes(scales),
        q_scale_max=torch.tensor([2.0 / (1 << bits) for bits, _ in groups]).half(),
        input_order=torch.randperm(rows, generator=generator),
        q_weight=torch.cat(words),
    )


class TestExl2CudaKernel(MatmulKernelConformance):
    plugin_module: ClassVar[str] = "ingle_quant_exl2.plugin"
    device: ClassVar[DeviceInfo] = CARD
    kernel_names: ClassVar[frozenset[str]] = frozenset({"exl2_triton"})
    max_relative_error: ClassVar[Mapping[str, float]] = Exl2Format.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        return [random_weight(((6, 64), (4, 128), (3, 32)), 40, dtype)]


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_packed_weight_dequantises_to_the_same_bits(
    groups: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingle_quant_exl2.cuda.PACK_ELEMENTS", 1)
    (kernel,) = ingle_matmul_kernels(CARD)
    weight = random_weight(groups, 136, torch.float16)
    packed = kernel.prepare(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert torch.equal(
        packed.columns(24, 136, torch.bfloat16), weight.columns(24, 136, torch.bfloat16)
    )
    assert kernel.prepare(packed) is packed
    assert "q_weight" not in packed.tensors()


def test_what_it_cannot_serve_is_declined_with_the_reason() -> None:
    (kernel,) = ingle_matmul_kernels(CARD)
    wide = random_weight(((4, 256),), 64, torch.float16)
    old = DeviceInfo(type="cuda", capability=(7, 5))
    cases = ((CARD, torch.float16, "256 rows"), (old, torch.float16, "7, 5"))
    for device, dtype, why in (*cases, (CARD, torch.float32, "float32")):
        support = kernel.supports(wide, KernelUse(device=device, dtype=dtype, rows=range(1, 17)))
        assert not support.ok
        assert why in support.reason
