"""The thirty-two quirks of specs/awq_gptq.md section 5, one named test each: what a loader of files
in the wild must survive. ``wild_packers.py`` packs them and shares nothing with the plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.dense import DenseFormat
from ingle.errors import CheckpointError, PluginError
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KernelUse, LinearSpec
from ingle.registry.choose import choose_weight_format
from ingle.registry.loader import load_plugins
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

NAME = "model.layers.0.mlp.down_proj"
WEIGHT = f"{NAME}.weight"
CPU = DeviceInfo(type="cpu")
FORMATS = (AwqFormat(), GptqFormat())
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def dense(dequantize: Callable[..., Any]) -> Callable[..., dict[str, torch.Tensor]]:
    """What ``ingle dequantize`` makes of tensors under a ``quantization_config``."""

    def run(tensors: Tensors, config: Any = None, **files: Any) -> dict[str, torch.Tensor]:
        stated = {"quantization_config": config} if config is not None else {}
        named = {f"{name}.json": content for name, content in files.items()}
        found: dict[str, torch.Tensor] = dequantize(
            tensors, {"config.json": stated, **named}, "--dtype", "float32"
        )
        return found

    return run


def loader_of(folder: Any) -> Any:
    """The loader of the format that claims the folder."""
    (claimed,) = [f for f in FORMATS if f.detect(folder.info) is not None]
    return claimed.open(folder.info)


def test_quirk_01_the_config_lies_in_a_file_of_its_own(rng: Any, wild: Any, dense: Any) -> None:
    """192 inputs in two groups are 128 and 64 only if the file beside config.json is read."""
    for name, key in (("quantize_config", "group_size"), ("quant_config", "q_group_size")):
        packed = wild.Gptq(group=128, g_idx="absent", sym=True).pack(rng, 64, 192)
        found = dense(packed.named(NAME), **{name: {"bits": 4, key: 128, "sym": True}})
        assert torch.equal(found[WEIGHT], packed.weight)


def test_quirk_02_the_method_is_missing(rng: Any, wild: Any, dense: Any) -> None:
    awq = wild.awq_gemm(rng, 64, 128)
    found = dense(awq.named(NAME), {"zero_point": True, "w_bit": 4, "q_group_size": 32})
    assert torch.equal(found[WEIGHT], awq.weight)
    gptq = wild.Gptq().pack(rng, 64, 128)
    found = dense(gptq.named(NAME), {"bits": 4, "group_size": 32, "sym": False})
    assert torch.equal(found[WEIGHT], gptq.weight)


def test_quirk_03_keys_have_synonyms_and_values_any_case(rng: Any, wild: Any, dense: Any) -> None:
    awq = wild.awq_gemm(rng, 64, 192, group=128)
    config = {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}
    assert torch.equal(dense(awq.named(NAME), config)[WEIGHT], awq.weight)
    gptq = wild.Gptq(group=128, g_idx="absent", zeros="v2").pack(rng, 64, 192)
    config = {"quant_method": "GPTQ", "wbits": 4, "groupsize": 128, "format": "GPTQ_V2"}
    assert torch.equal(dense(gptq.named(NAME), config)[WEIGHT], gptq.weight)


def test_quirk_04_sym_is_absent_and_the_data_is_not(rng: Any, wild: Any, dense: Any) -> None:
    packed = wild.Gptq(sym=False).pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quirk_05_a_zero_of_0_borrows_across_the_word(
    bits: int, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(bits=bits).pack(rng, 256, 256)
    assert (packed.extra["zeros"] == 0).any()
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_06_all_ones_over_the_rest_of_a_word_are_added_to_as_one_word(
    rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(group=-1).pack(rng, 8, 32)
    tensors = packed.named(NAME)
    stored = [4, 5, 6, 15, 15, 15, 15, 15]
    word = sum(value << (4 * place) for place, value in enumerate(stored))
    tensors[f"{NAME}.qzeros"] = wild.signed(np.array([[word]], dtype=np.uint64))
    found = dense(tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False})
    zeros = torch.tensor([5, 6, 7, 0, 1, 1, 1, 1])
    steps = packed.weight / packed.tensors["scales"].float().T
    codes = steps + torch.from_numpy(packed.extra["zeros"].T)
    wanted = (codes.round() - zeros[:, None]) * packed.tensors["scales"].float().T
    assert torch.equal(found[WEIGHT], wanted)


@pytest.mark.parametrize(
    ("sym", "meta"), [(True, None), (None, None), (False, {"quantizer": ["gptqmodel:4.2.5"]})]
)
def test_quirk_07_old_gptqmodel_swapped_the_constants_of_3_bit_zeros(
    sym: bool | None, meta: Any, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(bits=3, sym=sym is not False, zeros="legacy").pack(rng, 96, 128)
    config = {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": sym, "meta": meta}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


@pytest.mark.parametrize(("zeros", "label"), [("v2", "gptq"), ("v2", None), ("v1", "gptq_v2")])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quirk_08_symmetric_zeros_carry_the_wrong_label(
    bits: int, zeros: str, label: str | None, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(bits=bits, sym=True, zeros=zeros).pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": bits, "sym": True, "checkpoint_format": label}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


@pytest.mark.parametrize("desc_act", [True, False, None])
@pytest.mark.parametrize("g_idx", ["all zero", "absent", "sequential int64", "act", "act int64"])
def test_quirk_09_the_group_index_is_believed_over_desc_act(
    g_idx: str, desc_act: bool | None, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(g_idx=g_idx).pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": desc_act}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_10_the_last_group_is_short(rng: Any, wild: Any, dense: Any) -> None:
    for method, packed in (
        ("gptq", wild.Gptq(group=128).pack(rng, 64, 192)),
        ("gptq", wild.Gptq(group=128, g_idx="absent").pack(rng, 64, 192)),
        ("gptq", wild.Gptq(group=128, g_idx="act").pack(rng, 64, 192)),
        ("awq", wild.awq_gemm(rng, 64, 192, group=128)),
    ):
        config = {"quant_method": method, "bits": 4, "group_size": 128}
        assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


@pytest.mark.parametrize("bits", range(2, 9))
def test_quirk_11_features_do_not_fill_the_last_word(
    bits: int, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(bits=bits).pack(rng, 75, 117)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_12_a_bias_of_zeros_is_dropped_and_an_experts_is_kept(
    rng: Any, wild: Any, write_folder: Any
) -> None:
    packed, other = (wild.Gptq().pack(rng, 64, 128) for _ in range(2))
    expert = "model.layers.0.mlp.experts.1.w1"
    bias = torch.randn(64).half()
    tensors = {**packed.named(NAME), **other.named(expert)}
    tensors |= {f"{NAME}.bias": torch.zeros(64).half(), f"{expert}.bias": bias}
    folder = write_folder(tensors, {"quant_method": "gptq", "bits": 4})
    source = WeightSource(folder.checkpoint, [loader_of(folder)], prepared, torch.float32, CPU)
    assert source.linear([NAME], [64], 128).bias is None
    kept = source.linear([expert], [64], 128).bias
    assert kept is not None
    assert torch.equal(kept, bias.float())


@pytest.mark.parametrize("word_bits", [8, 16, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quirk_13_words_have_8_16_or_64_bits(
    bits: int, word_bits: int, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq(bits=bits, word_bits=word_bits).pack(rng, 64, 192)
    config = {"quant_method": "gptq", "bits": bits, "pack_dtype": f"int{word_bits}"}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_14_modules_that_dynamic_leaves_out_are_dense(
    rng: Any, wild: Any, dense: Any
) -> None:
    packed, plain = wild.Gptq().pack(rng, 64, 128), torch.randn(64, 128)
    other = "model.layers.1.mlp.down_proj"
    for rule in ({"-:model\\.layers\\.1\\..*": {}}, {"-:.*": None}):
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": rule}
        found = dense({**packed.named(NAME), f"{other}.weight": plain}, config)
        assert torch.equal(found[WEIGHT], packed.weight)
        assert torch.equal(found[f"{other}.weight"], plain)


def test_quirk_15_q_k_and_v_that_differ_are_not_forced_into_one(
    rng: Any, wild: Any, write_folder: Any
) -> None:
    options = {"q": {}, "k": {"bits": 8}, "v": {"group": 64}, "o": {"g_idx": "act"}, "same": {}}
    tensors: dict[str, torch.Tensor] = {}
    for name, option in options.items():
        tensors |= wild.Gptq(**option).pack(rng, 64, 128).named(f"a.{name}")
    tensors["a.dense.weight"] = torch.randn(64, 128)
    folder = write_folder(tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    loader = loader_of(folder)
    parts = {name: load(loader, folder, f"a.{name}", 64, 128) for name in options}
    for name in ("k", "v", "o"):
        assert loader.fuse([parts["q"], parts[name]]) is None
    assert loader.fuse([parts["q"], parts["same"]]) is not None
    loaders = [loader, DenseFormat().open(folder.info)]
    source = WeightSource(folder.checkpoint, loaders, prepared, torch.float32, CPU)
    names = ["a.q", "a.k", "a.dense"]
    linear = source.linear(names, [64] * 3, 128)
    x = torch.randn(3, 128)
    wanted = [parts["q"].dequantize(), parts["k"].dequantize(), tensors["a.dense.weight"]]
    torch.testing.assert_close(linear(x), x @ torch.cat(wanted).T, rtol=1e-4, atol=1e-4)


def load(loader: Any, folder: Any, name: str, n: int, k: int) -> Any:
    spec = LinearSpec(name=name, in_features=k, out_features=n, dtype=torch.float32, device=CPU)
    return loader.load_linear(spec, folder.checkpoint)


def prepared(weight: Any) -> Any:
    """As the engine prepares it: the first kernel that takes it."""
    from ingle.builtin.dense_linear import DenseTorchKernel
    from ingle.model.linear import ROW_RANGES, PreparedWeight

    use = KernelUse(device=CPU, dtype=torch.float32, rows=range(1, 17))
    kernels = [*ingle_matmul_kernels(CPU), DenseTorchKernel()]
    kernel = next(k for k in kernels if k.supports(weight, use))
    return PreparedWeight(weight=kernel.prepare(weight), kernels=(kernel,) * len(ROW_RANGES))


@pytest.mark.parametrize(
    "listed",
    [
        [["self_attn.q_proj"], ["mlp.up_proj"]],
        ["self_attn.q_proj"],
        ["mlp.gate_up_proj"],
        None,
        "mlp.up_proj",
    ],
)
def test_quirk_16_lists_of_modules_to_quantise_decide_nothing(
    listed: Any, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq().pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": listed}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_quirk_17_a_packed_head_is_read_whatever_the_flags_say(
    tied: bool, rng: Any, wild: Any, dequantize: Any
) -> None:
    packed = wild.Gptq().pack(rng, 96, 64)
    tensors = {**packed.named("lm_head"), "model.embed_tokens.weight": torch.randn(96, 64)}
    for flag in (True, False):
        config = {"quant_method": "gptq", "bits": 4, "lm_head": flag}
        stated = {"tie_word_embeddings": tied, "quantization_config": config}
        found = dequantize(tensors, {"config.json": stated}, "--dtype", "float32")
        assert torch.equal(found["lm_head.weight"], packed.weight)
        assert torch.equal(found["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_quirk_18_the_router_may_be_quantised(rng: Any, wild: Any, write_folder: Any) -> None:
    gate = "model.layers.0.mlp.gate"
    packed = wild.Gptq(g_idx="act").pack(rng, 64, 128)
    folder = write_folder(packed.named(gate), {"quant_method": "gptq", "bits": 4})
    assert dict(loader_of(folder).linears()) == {gate: (64, 128)}
    assert torch.equal(load(loader_of(folder), folder, gate, 64, 128).dequantize(), packed.weight)


def test_quirk_19_a_layer_may_lack_a_projection(rng: Any, wild: Any, write_folder: Any) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    names += [f"model.layers.1.self_attn.{part}_proj" for part in "qko"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= wild.awq_gemm(rng, 32, 64).named(name)
    folder = write_folder(tensors, {"quant_method": "awq"})
    assert set(loader_of(folder).linears()) == set(names)


def test_quirk_20_a_compressed_tensors_file_is_declined_with_what_it_is(
    write_folder: Any, monkeypatch: pytest.MonkeyPatch, plugin_site: Any
) -> None:
    monkeypatch.syspath_prepend(str(plugin_site))
    tensors = {
        f"{NAME}.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
        f"{NAME}.weight_scale": torch.ones(64, 4),
        f"{NAME}.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32),
    }
    folder = write_folder(tensors, {"quant_method": "compressed-tensors"})
    assert [f.detect(folder.info) for f in FORMATS] == [None, None]
    with pytest.raises(PluginError, match="quant_method 'compressed-tensors'"):
        choose_weight_format(load_plugins(), folder.info, "auto")


@pytest.mark.parametrize("skipped", [None, "gate", 3, [], ["gate"], ["down_proj", "mlp"], {}])
def test_quirk_21_a_wrong_list_of_modules_not_to_convert_is_borne(
    skipped: Any, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.awq_gemm(rng, 64, 128)
    config = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": skipped}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_22_an_activations_scales_divide_what_follows(
    rng: Any, wild: Any, write_folder: Any, cpu_product: Any, dense: Any
) -> None:
    packed = wild.awq_gemm(rng, 64, 128)
    divisor = torch.rand(128).half() + 0.5
    tensors = {**packed.named("h.0.mlp.c_proj"), "h.0.mlp.act.scales": divisor}
    folder = write_folder(tensors, {"quant_method": "awq", "bits": 4})
    weight = load(loader_of(folder), folder, "h.0.mlp.c_proj", 64, 128)
    x = torch.nn.functional.gelu(torch.randn(5, 128))
    wanted = (x / divisor.float()) @ packed.weight.T
    torch.testing.assert_close(cpu_product(weight, x), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x @ weight.dequantize().T, wanted, rtol=1e-4, atol=1e-4)
    found = dense(tensors, {"quant_method": "awq", "bits": 4})
    assert torch.equal(found["h.0.mlp.c_proj.weight"], packed.weight)
    assert torch.equal(found["h.0.mlp.act.scales"], divisor)


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
def test_quirk_23_scales_have_any_dtype(
    scales: torch.dtype, rng: Any, wild: Any, dense: Any
) -> None:
    for method, packed in (
        ("awq", wild.awq_gemm(rng, 64, 128, scales=scales)),
        ("gptq", wild.Gptq(scales=scales).pack(rng, 64, 128)),
    ):
        found = dense(packed.named(NAME), {"quant_method": method, "bits": 4})
        assert torch.equal(found[WEIGHT], packed.weight)


def test_quirk_24_the_marker_marlin_says_nothing_the_tensor_b_all(
    rng: Any, wild: Any, dense: Any
) -> None:
    plain = wild.Gptq(sym=True).pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin", "sym": True}
    assert torch.equal(dense(plain.named(NAME), config)[WEIGHT], plain.weight)
    for marker in ({"is_marlin_format": True}, {"checkpoint_format": "marlin"}, {}):
        for group in (-1, 128):
            packed = wild.marlin(rng, 256, 256, group=group, names=("B", "s"))
            found = dense(packed.named(NAME), {"quant_method": "gptq", "bits": 4, **marker})
            assert torch.equal(found[WEIGHT], packed.weight)


@pytest.mark.parametrize(
    "meta", [None, "x", {}, {"quantizer": "gptqmodel:5.0"}, {"quantizer": ["autogptq:0.8.0.dev1"]}]
)
def test_quirk_25_dynamic_may_be_null_and_the_quantizer_a_list_or_a_string(
    meta: Any, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq().pack(rng, 64, 128)
    config = {"quant_method": "gptq", "bits": 4, "dynamic": None, "meta": meta}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)


def test_quirk_26_auto_round_keeps_bits_by_module_and_no_group_index(
    rng: Any, wild: Any, dense: Any
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    wanted = {}
    names = {"model.layers.0.a": (2, 128), "model.layers.1.b": (8, 32), "model.layers.2.c": (4, 96)}
    for name, (bits, group) in names.items():
        packed = wild.Gptq(bits=bits, group=group, g_idx="absent").pack(rng, 64, 192)
        tensors |= packed.named(name)
        wanted[f"{name}.weight"] = packed.weight
    extra = {
        "model.layers.0.a": {"bits": 2, "group_size": 128},
        "1.b": {"bits": 8, "group_size": 32},
        "layers\\.[2-9]\\..*": {"bits": 4, "group_size": 96},
        "lm_head": {"bits": 16, "data_type": "float"},
    }
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": extra}
    found = dense(tensors, {**config, "packing_format": "auto_round:auto_gptq"})
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_quirk_27_padding_of_gemv_files_may_hold_anything(
    group: int, rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.awq_gemv(rng, 64, 384, group=group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"}
    assert torch.equal(dense(packed.named(NAME), config)[WEIGHT], packed.weight)
    if group > 0:
        packed = wild.awq_gemv_fast(rng, 64, 384, group=group)
        found = dense(packed.named(NAME), {**config, "version": "gemv_fast"})
        assert torch.equal(found[WEIGHT], packed.weight)


def test_quirk_28_buffers_that_nobody_needs_are_passed_by(rng: Any, wild: Any, dense: Any) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16),
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "model.position_ids": torch.arange(8)[None],
    }
    packed = wild.Gptq().pack(rng, 64, 128)
    found = dense({**packed.named(NAME), **buffers}, {"quant_method": "gptq", "bits": 4})
    assert torch.equal(found[WEIGHT], packed.weight)
    assert set(found) == {WEIGHT, *buffers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quirk_29_two_asymmetric_bits_multiply_to_numbers(
    dtype: torch.dtype, rng: Any, wild: Any, write_folder: Any, cpu_product: Any
) -> None:
    packed = wild.Gptq(bits=2, sym=False, g_idx="act").pack(rng, 96, 256)
    folder = write_folder(packed.named(NAME), {"quant_method": "gptq", "bits": 2, "sym": False})
    weight = load(loader_of(folder), folder, NAME, 96, 256)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 256).to(dtype)
        wanted = x.float() @ packed.weight.T
        error = (cpu_product(weight, x).float() - wanted).norm() / wanted.norm()
        assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("spelled", ["model.", "model.language_model.", "language_model.model."])
def test_quirk_30_configs_name_modules_as_older_libraries_did(
    prefix: str, spelled: str, rng: Any, wild: Any, dense: Any
) -> None:
    """The group of 128 over 192 inputs is stated for this one module only."""
    packed = wild.Gptq(group=128, g_idx="absent").pack(rng, 64, 192)
    name = f"{prefix}layers.3.mlp.up_proj"
    pattern = f"{spelled}layers.3.".replace(".", "\\.") + ".*"
    base = {"bits": 4, "group_size": 96, "sym": False}
    for config in (
        {"quant_method": "gptq", **base, "dynamic": {pattern: {"group_size": 128}}},
        {
            "quant_method": "auto-round",
            **base,
            "extra_config": {f"{spelled}layers.3.mlp.up_proj": {"group_size": 128}},
        },
    ):
        found = dense(packed.named(name), config)
        assert torch.equal(found[f"{name}.weight"], packed.weight)


def test_quirk_31_bfloat16_computes_what_overflows_float16(
    rng: Any, wild: Any, write_folder: Any, cpu_product: Any
) -> None:
    packed = wild.awq_gemm(rng, 64, 128)
    folder = write_folder(packed.named(NAME), {"quant_method": "awq", "bits": 4})
    weight = load(loader_of(folder), folder, NAME, 64, 128)
    for rows in (1, 17, 64):
        x = torch.full((rows, 128), 3e4)
        wanted = x @ packed.weight.T
        assert wanted.abs().max() > 65504
        assert not cpu_product(weight, x.half()).isfinite().all()
        found = cpu_product(weight, x.bfloat16()).float()
        assert (found - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq_marlin", "checkpoint_format": "gptq_marlin"},
        {"quant_method": "gptq", "checkpoint_format": "gptq_marlin", "modules_not_quantized": [1]},
        {"quant_method": "gptqmodel", "home": {"made": True}},
    ],
)
def test_quirk_32_homemade_names_are_synonyms_or_ignored(
    config: dict[str, Any], rng: Any, wild: Any, dense: Any
) -> None:
    packed = wild.Gptq().pack(rng, 64, 128)
    assert torch.equal(dense(packed.named(NAME), {**config, "bits": 4})[WEIGHT], packed.weight)
    awq = wild.awq_gemm(rng, 64, 128)
    found = dense(awq.named(NAME), {"quant_method": "awq_marlin", "bits": 4})
    assert torch.equal(found[WEIGHT], awq.weight)


@pytest.mark.parametrize("method", ["awq", "gptq", "exl2"])
def test_a_packed_lookup_table_is_refused_by_its_tensor(
    method: str, rng: Any, wild: Any, write_folder: Any
) -> None:
    from ingle_quant_exl2.format import Exl2Format

    packed, weight_format = {
        "awq": (wild.awq_gemm(rng, 64, 64), AwqFormat()),
        "gptq": (wild.Gptq().pack(rng, 64, 64), GptqFormat()),
        "exl2": (wild.exl2(rng, 64, [(4, 64)]), Exl2Format()),
    }[method]
    folder = write_folder(packed.named("model.embed_tokens"), {"quant_method": method})
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.q_?weight is a packed"):
        weight_format.open(folder.info)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_misshapen_tensors_are_named_with_the_shapes_wanted_and_found(
    method: str, rng: Any, wild: Any, write_folder: Any, monkeypatch: Any, plugin_site: Any
) -> None:
    monkeypatch.syspath_prepend(str(plugin_site))
    packed = wild.awq_gemm(rng, 64, 64) if method == "awq" else wild.Gptq().pack(rng, 64, 64)
    tensors = packed.named(NAME)
    tensors[f"{NAME}.scales"] = torch.ones(2, 7)
    folder = write_folder(tensors, {"quant_method": method, "bits": 4})
    with pytest.raises(PluginError) as caught:
        choose_weight_format(load_plugins(), folder.info, "auto")
    for part in (f"{NAME}.qweight", "wanted qweight [", f"'{NAME}.scales': [2, 7]"):
        assert part in str(caught.value)
