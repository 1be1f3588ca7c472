"""Dense weights: which tensors are linears, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseWeight, MkldnnKernel, mkldnn_support
from ingle.errors import CheckpointError
from ingle.plugin import Epilogue, KernelUse, LinearSpec
from ingle.plugin.row_counts import padded_rows
from ingle.testing import memory_checkpoint
from ingle.testing.foreign import FOREIGN_CHECKPOINTS, LINEAR

NOT_LINEARS = (
    "model.embed_tokens",
    "model.embed_positions",
    "transformer.wte",
    "wpe",
    "model.tok_embeddings",
    "bert.embeddings.word_embeddings",
)


def spec(name: str, n: int, k: int, device, dtype=torch.float32) -> LinearSpec:
    return LinearSpec(name=name, in_features=k, out_features=n, dtype=dtype, device=device)


def test_lookup_tables_norms_and_biases_are_no_linears() -> None:
    tensors = {f"{name}.weight": torch.zeros(8, 4) for name in (*NOT_LINEARS, "lm_head", "a.proj")}
    tensors |= {"model.norm.weight": torch.zeros(4), "a.proj.bias": torch.zeros(8)}
    loader = DenseFormat().open(memory_checkpoint(tensors).info)
    assert loader.linears() == {"lm_head": (8, 4), "a.proj": (8, 4)}


def test_a_tied_head_is_read_from_the_embeddings(cpu) -> None:
    table = torch.randn(8, 4)
    checkpoint = memory_checkpoint({"model.embed_tokens.weight": table})
    loader = DenseFormat().open(checkpoint.info)
    weight = loader.load_linear(spec("model.embed_tokens", 8, 4, cpu), checkpoint.reader)
    assert torch.equal(weight.dequantize(), table)


def test_the_dense_part_of_a_packed_checkpoint_can_be_opened() -> None:
    loader = DenseFormat().open(FOREIGN_CHECKPOINTS["gptq"])
    assert loader.linears() == {"lm_head": (256, 64)}


def test_a_packed_linear_is_refused_by_name_and_dtype(cpu) -> None:
    loader = DenseFormat().open(FOREIGN_CHECKPOINTS["fp8"])
    with pytest.raises(CheckpointError, match=f"{LINEAR}.weight: wanted a matrix of .* F8_E4M3"):
        loader.packed_bytes(LINEAR)


def test_a_missing_linear_is_refused_by_name(cpu) -> None:
    checkpoint = memory_checkpoint({"a.weight": torch.zeros(8, 4)})
    with pytest.raises(CheckpointError, match=r"b\.weight: no such tensor"):
        DenseFormat().open(checkpoint.info).load_linear(spec("b", 8, 4, cpu), checkpoint.reader)


def test_another_shape_is_refused_with_both_shapes(cpu) -> None:
    checkpoint = memory_checkpoint({"a.weight": torch.zeros(8, 4)})
    with pytest.raises(CheckpointError, match=r"wanted shape \[8, 5\], found \[8, 4\]"):
        DenseFormat().open(checkpoint.info).load_linear(spec("a", 8, 5, cpu), checkpoint.reader)


def test_a_weight_comes_in_the_activation_dtype(cpu) -> None:
    checkpoint = memory_checkpoint({"a.weight": torch.ones(8, 4, dtype=torch.float16)})
    loader = DenseFormat().open(checkpoint.info)
    weight = loader.load_linear(spec("a", 8, 4, cpu, torch.bfloat16), checkpoint.reader)
    assert weight.dequantize().dtype is torch.bfloat16


def test_a_weight_of_the_right_dtype_shares_the_mapped_file(cpu) -> None:
    stored = torch.ones(8, 4)
    checkpoint = memory_checkpoint({"a.weight": stored})
    loader = DenseFormat().open(checkpoint.info)
    weight = loader.load_linear(spec("a", 8, 4, cpu), checkpoint.reader)
    assert weight.dequantize().data_ptr() == stored.data_ptr()


def test_weights_of_different_inputs_or_dtypes_do_not_fuse() -> None:
    loader = DenseFormat().open(memory_checkpoint({"a.weight": torch.zeros(8, 4)}).info)
    a = DenseWeight(torch.zeros(8, 4))
    assert loader.fuse([a, DenseWeight(torch.zeros(8, 5))]) is None
    assert loader.fuse([a, DenseWeight(torch.zeros(8, 4).bfloat16())]) is None
    assert loader.fuse([]) is None


def test_old_position_buffers_are_no_sign_of_packing() -> None:
    tensors = {
        "a.weight": torch.zeros(8, 4),
        "embeddings.position_ids": torch.zeros(1, 9, dtype=torch.int64),
        "a.bias_mask": torch.zeros(1, 1, 9, 9, dtype=torch.bool),
    }
    assert DenseFormat().detect(memory_checkpoint(tensors).info) is not None


def test_the_prepacked_kernel_declines_when_an_op_is_missing(
    cpu, weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoOps:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", NoOps())
    support = mkldnn_support()
    assert not support
    assert "torch.ops.mkldnn._reorder_linear_weight" in support.reason


def test_the_prepacked_kernel_declines_other_dtypes(cpu, weight, use) -> None:
    support = MkldnnKernel().supports(weight, use)
    assert "only bfloat16" in support.reason


@pytest.mark.skipif(not mkldnn_support(), reason="this processor has no bf16 for oneDNN")
def test_a_prepacked_weight_takes_no_more_memory_and_unpacks_exactly(cpu) -> None:
    matrix = torch.randn(96, 64).bfloat16()
    use = KernelUse(device=cpu, dtype=torch.bfloat16, rows=range(1, 17))
    kernel = MkldnnKernel()
    packed = kernel.prepare(DenseWeight(matrix))
    assert kernel.supports(packed, use)
    assert packed.nbytes == matrix.numel() * 2
    assert torch.equal(packed.dequantize(), matrix)
    assert kernel.prepare(packed) is packed


def test_prompts_of_any_length_make_few_shapes() -> None:
    """oneDNN keeps something of every shape; with one for each row count, memory grows."""
    assert len({padded_rows(rows) for rows in range(1, 33)}) == 10
    assert len({padded_rows(rows) for rows in range(1, 4097)}) < 96
    assert all(rows <= padded_rows(rows) <= rows + 63 for rows in range(1, 4097))
    exact = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 256, 512, 2048)
    assert all(padded_rows(rows) == rows for rows in exact)


@pytest.mark.skipif(not mkldnn_support(), reason="this processor has no bf16 for oneDNN")
def test_padded_rows_change_no_row() -> None:
    kernel, generator = MkldnnKernel(), torch.Generator().manual_seed(1)
    weight = kernel.prepare(DenseWeight(torch.randn(24, 40, generator=generator).bfloat16()))
    for rows in (33, 70, 300):
        x = torch.randn(rows, 40, generator=generator).bfloat16()
        residual = torch.randn(rows, 24, generator=generator).bfloat16()
        epilogue = Epilogue(kind="add", residual=residual)
        wanted = x.float() @ weight.dequantize().float().t()
        found = kernel.matmul(x, weight)
        assert found.shape == (rows, 24)
        assert torch.allclose(found.float(), wanted, atol=0.2, rtol=0.02)
        added = kernel.matmul(x, weight, epilogue=epilogue)
        assert torch.allclose(added.float(), wanted + residual.float(), atol=0.2, rtol=0.02)
