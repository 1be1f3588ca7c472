"""The fp8 cache formats: slots, blocks, scales and what a checkpoint says about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ingle.errors import CheckpointError, PluginError
from ingle.plugin import CheckpointInfo, DeviceInfo, KVCacheGeometry
from ingle.testing import memory_checkpoint
from ingle_kv_fp8.format import Fp8E4M3Format, Fp8E5M2Format, Fp8Format, Fp8Store
from ingle_kv_fp8.plugin import ingle_kv_cache_formats

CPU = DeviceInfo(type="cpu")
FORMATS = (Fp8E4M3Format(), Fp8E5M2Format())
LAYER = "model.layers.3.self_attn"
BLOCKS, BLOCK, HEADS, DIM = 6, 8, 2, 16


def geometry(side: Any = "k", **changes: Any) -> KVCacheGeometry:
    values = {
        "num_kv_heads": HEADS,
        "head_dim": DIM,
        "block_size": BLOCK,
        "dtype": torch.bfloat16,
    }
    return KVCacheGeometry(side=side, **{**values, **changes})


def store_of(form: Fp8Format, **changes: Any) -> Fp8Store:
    return form.allocate(geometry(**changes), BLOCKS, CPU)


def random_rows(tokens: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=generator).bfloat16()


def everything(form: Fp8Format, store: Fp8Store) -> torch.Tensor:
    """All slots: [B*S, H, D]."""
    table = torch.arange(store.num_blocks)
    slots = store.num_blocks * store.geometry.block_size
    return form.gather(store, table, slots).transpose(0, 1)


def scale_file(**tensors: Any) -> Any:
    named = {name.replace("__", "."): torch.as_tensor(t) for name, t in tensors.items()}
    return memory_checkpoint({f"{LAYER}.{name}": tensor for name, tensor in named.items()}).reader


def config(
    quantization: Mapping[str, Any] | None = None, files: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    return CheckpointInfo(
        path=Path("/model"),
        hf_config={},
        quantization_config=quantization,
        config_files=files or {},
    )


def test_the_plugin_offers_both_types_and_the_short_name_means_e4m3() -> None:
    formats = ingle_kv_cache_formats(CPU)
    assert [form.name for form in formats] == ["fp8_e4m3", "fp8_e5m2"]
    assert [form.name for form in formats if "fp8" in form.aliases] == ["fp8_e4m3"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_number_takes_one_byte_and_nothing_else_is_allocated(form: Fp8Format) -> None:
    store = store_of(form)
    tensors = store.tensors()
    assert form.bytes_per_block(store.geometry) == HEADS * BLOCK * DIM
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == (
        BLOCKS * form.bytes_per_block(store.geometry)
    )
    assert all(tensor.shape[0] == BLOCKS for tensor in tensors.values())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_consecutive_blocks_of_one_head_are_one_run_of_memory(form: Fp8Format) -> None:
    store = store_of(form)
    form.write(store, random_rows(BLOCKS * BLOCK), torch.arange(BLOCKS * BLOCK))
    run = store.tensors()["codes"][1:4, 1]
    assert run.stride() == (BLOCK * DIM, DIM, 1)
    assert form.view(store, 1, BLOCK) is None


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_repeated_slot_holds_its_last_write_and_neighbours_keep_their_bits(
    form: Fp8Format,
) -> None:
    store = store_of(form)
    form.write(store, random_rows(BLOCKS * BLOCK), torch.arange(BLOCKS * BLOCK))
    before = store.codes.clone()
    slots = torch.tensor([9, 40, 9, 17, 40, 9])
    x = random_rows(6, seed=1)
    form.write(store, x, slots)
    single = store_of(form)
    single.codes.copy_(before)
    for slot, row in ((17, 3), (40, 4), (9, 5)):
        form.write(single, x[row : row + 1], torch.tensor([slot]))
    assert torch.equal(store.codes, single.codes)
    changed = (store.codes != before).any(-1).any(0).flatten().nonzero().flatten()
    assert set(changed.tolist()) <= {9, 17, 40}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_blocks_are_gathered_in_table_order_whether_consecutive_or_not(form: Fp8Format) -> None:
    store = store_of(form)
    form.write(store, random_rows(BLOCKS * BLOCK), torch.arange(BLOCKS * BLOCK))
    rows = everything(form, store)
    for table in ([2, 3, 4], [4, 1, 5], [3, 3, 3], [5]):
        slots = (torch.tensor(table)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        for length in (1, BLOCK, len(table) * BLOCK - 3, len(table) * BLOCK):
            found = form.gather(store, torch.tensor([*table, 0]), length)
            assert found.shape == (HEADS, length, DIM)
            assert torch.equal(found.transpose(0, 1), rows[slots[:length]])


def test_two_geometries_from_one_object_do_not_mix() -> None:
    form = FORMATS[0]
    small = store_of(form)
    large = store_of(form, side="v", num_kv_heads=3, head_dim=32, block_size=16)
    form.observe(small, random_rows(5) * 0.01)
    x = random_rows(4, heads=3, dim=32)
    form.write(large, x, torch.arange(4))
    form.write(small, random_rows(4), torch.arange(4))
    found = form.gather(large, torch.tensor([0]), 4).transpose(0, 1)
    assert (found - x).norm() / x.norm() < 0.03
    assert large.has_unit_scale
    assert not small.has_unit_scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_is_read_has_the_geometrys_dtype(form: Fp8Format, dtype: torch.dtype) -> None:
    for measured in (False, True):
        store = store_of(form, dtype=dtype)
        x = random_rows(BLOCK).to(dtype)
        if measured:
            form.observe(store, x)
        form.write(store, x, torch.arange(BLOCK))
        found = form.gather(store, torch.tensor([0]), BLOCK)
        assert found.dtype is dtype
        bound = form.max_relative_error[str(dtype).removeprefix("torch.")]
        assert (found.transpose(0, 1).double() - x.double()).norm() / x.double().norm() < bound


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("qkv_proj__k_scale", "qkv_proj__v_scale"),
        ("qkqkv_proj__k_scale", "qkqkv_proj__v_scale"),
        ("k_cache__scale", "v_cache__scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_scales_are_found_under_every_name_checkpoints_use(
    names: tuple[str, str], shape: tuple[int, ...]
) -> None:
    reader = scale_file(
        **{
            names[0]: torch.full(shape, 0.5),
            names[1]: torch.full(shape, 0.25),
            "q_scale": torch.tensor(9.0),
            "k_zero_point": torch.tensor(0.0),
        }
    )
    for side, wanted in (("k", 0.5), ("v", 0.25)):
        store = store_of(FORMATS[0], side=side)
        assert FORMATS[0].load_scales(store, LAYER, reader)
        assert store.scale.flatten().tolist() == [wanted]


def test_one_legacy_scale_serves_both_sides_and_values_fall_back_to_the_keys_scale() -> None:
    for tensors in ({"kv_scale": 0.5}, {"k_scale": 0.5}):
        for side in ("k", "v"):
            store = store_of(FORMATS[0], side=side)
            assert FORMATS[0].load_scales(store, LAYER, scale_file(**tensors))
            assert store.scale.item() == 0.5


def test_without_scales_of_its_own_layer_the_scale_is_one() -> None:
    other = memory_checkpoint({"model.layers.30.self_attn.k_scale": torch.tensor(0.5)}).reader
    store = store_of(FORMATS[0])
    assert not FORMATS[0].load_scales(store, LAYER, other)
    assert not FORMATS[0].load_scales(store, LAYER, scale_file(v_scale=0.5))
    assert store.scale.flatten().tolist() == [1.0]


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)], ids=str)
def test_one_scale_per_head_is_cut_to_this_ranks_heads(shape: tuple[int, ...]) -> None:
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(shape)
    store = store_of(FORMATS[0], first_kv_head=2)
    assert FORMATS[0].load_scales(store, LAYER, scale_file(k_scale=scales))
    assert store.scale.shape == (HEADS, 1, 1)
    torch.testing.assert_close(store.scale.flatten(), torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("value", [-2.0, -0.5, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused_by_name(value: float) -> None:
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.k_scale holds"):
        FORMATS[0].load_scales(store_of(FORMATS[0]), LAYER, scale_file(k_scale=value))


def test_scales_for_fewer_heads_than_the_model_has_are_refused_by_name() -> None:
    store = store_of(FORMATS[0], first_kv_head=2)
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.k_scale holds 3 scales"):
        FORMATS[0].load_scales(store, LAYER, scale_file(k_scale=[0.1, 0.2, 0.3]))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_stored_is_the_rounded_quotient_and_read_is_the_product(form: Fp8Format) -> None:
    scales = torch.tensor([0.037, 2.5])
    x = random_rows(BLOCK, seed=3) * 20
    store = store_of(form, dtype=torch.float32)
    form.load_scales(store, LAYER, scale_file(k_scale=scales))
    form.write(store, x, torch.arange(BLOCK))
    wanted = form.codec.decode(form.codec.encode(x.float() / scales[:, None])).float()
    found = form.gather(store, torch.tensor([0]), BLOCK).transpose(0, 1)
    assert torch.equal(found, wanted * scales[:, None])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_measuring_leaves_room_and_rounds_as_well_as_any_scale_of_the_octave(
    form: Fp8Format,
) -> None:
    store = store_of(form, side="v", dtype=torch.float32)
    x = random_rows(10).float()
    x[4, 0, 3], x[2, 1, 7] = -1000.0, 0.01
    x[:, 1] *= 0.001
    form.observe(store, x)
    scales = store.scale.flatten()
    room = form.codec.largest * scales / x.abs().amax((0, 2))
    assert ((room > 1.999) & (room < 4.1)).all()

    def errors(scale: torch.Tensor) -> torch.Tensor:
        largest = form.codec.largest
        codes = (x / scale.view(1, -1, 1)).clamp(-largest, largest)
        rounded = codes.to(getattr(torch, form.codec.dtype_name)).float() * scale.view(1, -1, 1)
        return (rounded - x).square().sum((0, 2))

    low = 2 * x.abs().amax((0, 2)) / form.codec.largest
    low = 2.0 ** ((low.log2() * 16).ceil() / 16)
    tried = torch.stack([errors(low * 2.0 ** (step / 16)) for step in range(16)])
    assert (errors(scales) <= tried.amin(0) * 1.0001).all()
    form.write(store, x, torch.arange(10))
    found = form.gather(store, torch.arange(2), 10).transpose(0, 1)
    for head in range(HEADS):
        error = (found[:, head] - x[:, head]).norm() / x[:, head].norm()
        assert error < form.max_relative_error["float32"]


def test_measuring_leaves_out_what_is_not_a_number_and_heads_of_zeros() -> None:
    store = store_of(FORMATS[0], side="v")
    x = torch.zeros(4, HEADS, DIM)
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.448])
    FORMATS[0].observe(store, x.bfloat16())
    first, second = store.scale.flatten().tolist()
    assert 0.00199 < first < 0.0041
    assert second == 1.0
    FORMATS[0].observe(store, x[:0])
    assert store.scale.flatten().tolist()[1] == 1.0


def sylvester(dim: int) -> torch.Tensor:
    """float64 [dim, dim]: the sign is the parity of the bits that row and column share, within
    each run of the largest power of two that divides ``dim``."""
    part = dim & -dim
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(part)] for i in range(part)]
    whole = torch.block_diag(*[torch.tensor(rows, dtype=torch.float64)] * (dim // part))
    return whole / part**0.5


@pytest.mark.parametrize("dim", [16, 48, 64, 80])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_measured_keys_are_stored_turned_and_read_as_they_were(form: Fp8Format, dim: int) -> None:
    store = store_of(form, head_dim=dim, dtype=torch.float32)
    x = random_rows(BLOCK, seed=5, dim=dim).float()
    x[..., 3] *= 50
    form.observe(store, x)
    form.write(store, x, torch.arange(BLOCK))
    turned = x.double() @ sylvester(dim)
    scales = store.scale.view(1, HEADS, 1).double()
    wanted = form.codec.encode(turned / scales)
    codes = store.codes[:, 0].transpose(0, 1)
    apart = (codes.int() - wanted.int()).abs()
    assert apart.max() <= 1  # float32 sums may fall on the other side of a middle
    assert (apart > 0).float().mean() < 0.002
    table = torch.tensor([0])
    stored = form.gather_stored(store, table, BLOCK).transpose(0, 1).double()
    wanted = form.codec.decode(codes).double() * scales
    torch.testing.assert_close(stored, wanted, rtol=1e-6, atol=0)
    found = form.gather(store, table, BLOCK).transpose(0, 1).double()
    torch.testing.assert_close(found, stored @ sylvester(dim), rtol=0, atol=1e-5 * 50)
    assert (found - x.double()).norm() / x.double().norm() < form.max_relative_error["float32"]


def test_turning_keeps_logits_that_a_few_dimensions_decide() -> None:
    x, query = (random_rows(BLOCK, seed=seed, dim=64).float() for seed in (8, 9))
    for rows in (x, query):
        rows[..., 5] *= 12
        rows[..., 40] *= 8
    wanted = torch.einsum("thd,shd->hts", query, x)
    errors = []
    for is_measured in (False, True):
        store = store_of(FORMATS[0], head_dim=64, dtype=torch.float32)
        if is_measured:
            FORMATS[0].observe(store, x)
        FORMATS[0].write(store, x, torch.arange(BLOCK))
        keys = FORMATS[0].gather(store, torch.tensor([0]), BLOCK)
        errors.append(float((torch.einsum("thd,hsd->hts", query, keys) - wanted).norm()))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_is_turned_saturates_and_only_nan_becomes_nan(form: Fp8Format) -> None:
    store = store_of(form)
    form.observe(store, random_rows(4))
    x = random_rows(3, seed=2)
    x[0, 0, 3], x[0, 0, 4], x[1, 1, 2] = float("inf"), -float("inf"), float("nan")
    form.write(store, x, torch.arange(3))
    found = form.gather_stored(store, torch.tensor([0]), 3).transpose(0, 1)
    assert found[1, 1].isnan().all()
    assert found.isnan().sum() == DIM
    top = form.codec.largest * store.scale[0].item()
    assert found[0, 0].float().abs().max() == pytest.approx(top, rel=0.01)


def test_only_keys_whose_scales_were_measured_are_turned() -> None:
    form = FORMATS[0]
    keys, values, unmeasured = (store_of(form, side=side) for side in ("k", "v", "k"))
    for store in (keys, values):
        form.observe(store, random_rows(5))
    assert keys.rotation is not None
    assert values.rotation is None
    assert unmeasured.rotation is None
    other = store_of(form)
    form.observe(other, random_rows(2))
    assert other.rotation is keys.rotation


def test_scales_of_the_checkpoint_are_not_measured_again() -> None:
    store = store_of(FORMATS[0])
    FORMATS[0].load_scales(store, LAYER, scale_file(k_scale=0.5))
    FORMATS[0].observe(store, random_rows(3) * 100)
    assert store.scale.flatten().tolist() == [0.5]
    assert store.rotation is None


def test_a_scale_cannot_change_once_something_is_stored() -> None:
    store = store_of(FORMATS[0])
    FORMATS[0].write(store, random_rows(1), torch.tensor([9]))
    with pytest.raises(PluginError, match="before the first write"):
        FORMATS[0].observe(store, random_rows(3))
    assert store.rotation is None
    with pytest.raises(PluginError, match="before the first write"):
        FORMATS[0].load_scales(store, LAYER, scale_file(k_scale=0.5))


def test_the_store_of_another_format_is_refused() -> None:
    with pytest.raises(PluginError, match="given a str"):
        FORMATS[0].gather("store", torch.tensor([0]), 1)  # type: ignore[arg-type]


SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}


@pytest.mark.parametrize(
    "info",
    [
        config({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}),
        config({"kv_cache_scheme": {**SCHEME, "strategy": "attn_head", "dynamic": False}}),
        config({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}),
        config({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}),
        config(files={"hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}}}),
    ],
)
def test_a_checkpoint_that_asks_for_an_fp8_cache_gets_e4m3(info: CheckpointInfo) -> None:
    detection = FORMATS[0].detect(info)
    assert detection is not None
    assert "kv_cache" in detection.reason
    assert FORMATS[1].detect(info) is None


@pytest.mark.parametrize(
    "info",
    [
        config(),
        config({"quant_method": "fp8"}),
        config({"kv_cache_scheme": None}),
        config({"kv_cache_scheme": {**SCHEME, "type": "int"}}),
        config({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}),
        config({"kv_cache_scheme": {**SCHEME, "symmetric": False}}),
        config({"kv_cache_scheme": {**SCHEME, "strategy": "channel"}}),
        config({"kv_cache_quant_algo": "NVFP4"}),
        config(files={"hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": None}}}),
        config(files={"hf_quant_config.json": {"quantization": "FP8"}}),
    ],
)
def test_other_checkpoints_ask_for_nothing(info: CheckpointInfo) -> None:
    assert FORMATS[0].detect(info) is None


@pytest.mark.parametrize("unset", [0.0, -1.0, [-1.0, -1.0]])
def test_zero_and_minus_one_mean_that_there_is_no_scale(unset: Any) -> None:
    reader = scale_file(k_scale=unset, v_scale=0.25)
    assert not FORMATS[0].load_scales(store_of(FORMATS[0]), LAYER, reader)
    values = store_of(FORMATS[0], side="v")
    assert FORMATS[0].load_scales(values, LAYER, scale_file(k_scale=0.5, v_scale=unset))
    assert values.scale.flatten().tolist() == [0.5]
