"""The CPU kernel against ``x @ dequantize().T`` in float64."""

from __future__ import annotations

import pytest
import torch

from ingle.plugin import DeviceInfo, KernelUse
from ingle_quant_exl2 import cpu
from ingle_quant_exl2.cpu import Exl2CpuKernel, NibbleExl2Weight
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.nibbles import packing_is_known, plan_nibbles
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.weight import StoredExl2Weight

CPU = DeviceInfo(type="cpu")
needs_int4 = pytest.mark.skipif(
    not packing_is_known(), reason="this processor's torch packs int4 in another way"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (0, 1, 2, 7, 15, 16, 17, 64, 65, 257)
LAYOUTS = {
    "4 bit": ((4, 128),) * 3,
    "5 and 4 bit": ((5, 32), (5, 32), (4, 32), (4, 128)),
    "8 and 6 bit": ((8, 128), (6, 128), (6, 128)),
    "8 bit with a short tail": ((8, 128), (8, 96)),
    "3 and 2 bit with short tails": ((3, 64), (3, 32), (2, 64), (2, 32)),
    "all widths": ((8, 32), (6, 64), (5, 64), (4, 128), (3, 64), (2, 32)),
    "padded groups are cheaper": ((4, 128),) * 5 + ((3, 128),) * 5 + ((2, 96),),
}


def random_weight(
    groups: tuple[tuple[int, int], ...], outputs: int, dtype: torch.dtype
) -> StoredExl2Weight:
    generator = torch.Generator().manual_seed(7)
    words, pairs = [], []
    for bits, size in groups:
        pairs += [bits, sum(len(part) for part in words)]
        codes = torch.randint(0, 1 << bits, (size, outputs), generator=generator)
        words.append(pack_codes(codes, bits))
    rows = sum(size for _, size in groups)
    q_weight = torch.cat(words)
    scales = torch.randint(0, 16, (len(groups), outputs), generator=generator)
    # Scales of a real file: a group's weights have about the same size whatever its width.
    largest = torch.tensor([2.0 / (1 << bits) for bits, _ in groups])
    return StoredExl2Weight(
        in_features=rows,
        out_features=outputs,
        stored_out_features=outputs,
        dtype=dtype,
        layout=parse_layout("lin", pairs, len(q_weight), rows),
        q_scale=pack_scale_codes(scales),
        q_scale_max=largest.half(),
        input_order=torch.randperm(rows, generator=generator),
        q_weight=q_weight,
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_equals_the_dequantised_product(layout: str, dtype: torch.dtype) -> None:
    kernel = Exl2CpuKernel()
    weight = random_weight(LAYOUTS[layout], 80, dtype)
    matrix = weight.dequantize().double()
    prepared = kernel.prepare(weight)
    assert torch.equal(prepared.dequantize().double(), matrix)
    bound = Exl2Format.max_relative_error[str(dtype).removeprefix("torch.")]
    for rows in ROWS:
        assert kernel.supports(prepared, KernelUse(device=CPU, dtype=dtype, rows=range(rows + 1)))
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, weight.in_features, generator=generator).to(dtype)
        y = kernel.matmul(x[:, prepared.input_order], prepared)
        assert (y.shape, y.dtype) == ((rows, 80), dtype)
        assert relative_error(y, x.double() @ matrix.T) < bound, rows


@needs_int4
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_weights_become_nibbles_that_give_back_every_code(layout: str) -> None:
    weight = random_weight(LAYOUTS[layout], 144, torch.bfloat16)
    prepared = Exl2CpuKernel().prepare(weight)
    assert isinstance(prepared, NibbleExl2Weight)
    for section in weight.layout.sections:
        for start, stop in ((0, 64), (64, 144), (0, 144)):
            found = prepared.codes(section, start, stop)
            assert torch.equal(found, weight.codes(section, start, stop))


def test_narrow_codes_take_one_nibble_and_wide_ones_two() -> None:
    weight = random_weight(LAYOUTS["all widths"], 64, torch.bfloat16)
    plan = plan_nibbles(weight.layout)
    assert plan.num_rows == 384 + 160
    padded = random_weight(LAYOUTS["padded groups are cheaper"], 64, torch.bfloat16)
    plan = plan_nibbles(padded.layout)
    assert (plan.group_size, plan.num_rows) == (128, 11 * 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_keep_the_exact_packing(dtype: torch.dtype) -> None:
    weight = random_weight(LAYOUTS["all widths"], 64, dtype)
    assert Exl2CpuKernel().prepare(weight) is weight


def test_outputs_the_int4_product_refuses_stay_as_they_are_and_still_multiply() -> None:
    weight = random_weight(LAYOUTS["5 and 4 bit"], 72, torch.bfloat16)
    kernel = Exl2CpuKernel()
    assert kernel.prepare(weight) is weight
    x = torch.randn(3, weight.in_features).bfloat16()
    y = kernel.matmul(x[:, weight.input_order], weight)
    assert relative_error(y, x.double() @ weight.dequantize().double().T) < 4e-3


def test_an_unknown_packing_of_torchs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "packing_is_known", lambda: False)
    weight = random_weight(LAYOUTS["4 bit"], 64, torch.bfloat16)
    assert Exl2CpuKernel().prepare(weight) is weight


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input_is_read_right_and_left_alone_and_out_is_filled(
    rows: int, dtype: torch.dtype
) -> None:
    kernel = Exl2CpuKernel()
    weight = random_weight(LAYOUTS["4 bit"], 64, dtype)
    prepared = kernel.prepare(weight)
    wide = torch.randn(rows * 2, 2 * weight.in_features).to(dtype)
    x = wide[::2, ::2]
    before = wide.clone()
    wanted = kernel.matmul(x.contiguous(), prepared)
    out = torch.full((rows, 64), float("nan"), dtype=dtype)
    assert kernel.matmul(x, prepared, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.equal(wide, before)
    assert torch.equal(kernel.matmul(x, prepared), wanted)


@needs_int4
def test_a_matrix_of_several_chunks_is_the_same_as_one_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Exl2CpuKernel()
    weight = random_weight(LAYOUTS["all widths"], 208, torch.bfloat16)
    x = torch.randn(80, weight.in_features).bfloat16()
    whole = kernel.prepare(weight)
    assert isinstance(whole, NibbleExl2Weight)
    monkeypatch.setattr("ingle_quant_exl2.weight.CHUNK_ELEMENTS", 1)
    assert len(weight.column_chunks()) == 4
    parts = kernel.prepare(weight)
    assert isinstance(parts, NibbleExl2Weight)
    assert torch.equal(parts.nibbles, whole.nibbles)
    matrix = weight.dequantize().double()
    assert torch.equal(parts.dequantize().double(), matrix)
    y = kernel.matmul(x[:, weight.input_order], parts)
    assert relative_error(y, x.double() @ matrix.T) < 4e-3


def test_other_weights_and_devices_are_declined_with_a_reason() -> None:
    kernel = Exl2CpuKernel()
    weight = random_weight(LAYOUTS["4 bit"], 64, torch.float32)
    cuda = DeviceInfo(type="cuda", capability=(8, 6))
    rows = range(1, 17)
    use = KernelUse(device=cuda, dtype=torch.float32, rows=rows)
    assert kernel.supports(weight, use).reason == "only on a CPU"
    use = KernelUse(device=CPU, dtype=torch.float64, rows=rows)
    assert "float64" in kernel.supports(weight, use).reason
    use = KernelUse(device=CPU, dtype=torch.float32, rows=rows)
    assert not kernel.supports(object(), use)  # type: ignore[arg-type]
