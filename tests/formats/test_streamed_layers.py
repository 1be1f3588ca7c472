"""Layers whose weights come over from the host ahead of their use, to a device that is not there:
it counts its buffers, and its copies arrive as late as they may."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseTorchKernel, MkldnnKernel
from ingle.builtin.kv_native import NativeKVCache
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.errors import CapacityError
from ingle.model.build import build_decoder
from ingle.model.decoder import Decoder
from ingle.model.linear import ROW_RANGES, PreparedWeight, find_linears
from ingle.model.streamed_layers import Offload, StreamedLayer
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KernelUse, KVCacheGeometry, LinearWeight, WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_exl2.cpu import Exl2CpuKernel
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_gptq.format import GptqFormat

CPU = DeviceInfo(type="cpu")
EXL2 = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2" / "tiny_llama_exl2"
POISON = 0xFF
"""A float of such bytes is NaN; codes of them are the largest, with scales that are NaN."""
TOKENS = torch.tensor([1, 17, 42, 99, 3, 64, 7, 5])
FORMATS: dict[str, WeightFormat] = {
    "dense": DenseFormat(),
    "awq": AwqFormat(),
    "gptq": GptqFormat(),
    "exl2": Exl2Format(),
}


@dataclass
class LateBoundary:
    """A device on which a copy arrives when somebody waits for it, and not a moment sooner.

    Attributes:
        buffers: Those that were made.
        log: What was asked, in order: what, and the slot.
        hosted: Bytes of every layer that was stored.
        under_way: Copies that were begun and nobody waited for, by slot.
        in_use: Slots that are computed from.
    """

    buffers: list[torch.Tensor] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    hosted: list[int] = field(default_factory=list)
    under_way: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    in_use: set[int] = field(default_factory=set)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        self.hosted.append(data.numel())
        return data.clone()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.full((num_bytes,), POISON, dtype=torch.uint8))
        return self.buffers[-1]

    def start(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        assert slot not in self.in_use, "a copy into a buffer that is being computed from"
        assert slot not in self.under_way, "two copies into one buffer"
        target.fill_(POISON)
        self.under_way[slot] = (source, target)
        self.log.append(("start", slot))

    def wait(self, slot: int) -> None:
        if slot in self.under_way:
            source, target = self.under_way.pop(slot)
            target.copy_(source)
        self.in_use.add(slot)
        assert len(self.in_use) == 1, "two layers compute at once"
        self.log.append(("wait", slot))

    def done(self, slot: int) -> None:
        self.in_use.remove(slot)
        self.log.append(("done", slot))


def prepare_for(dtype: torch.dtype) -> Any:
    kernels = [*ingle_matmul_kernels(CPU), Exl2CpuKernel(), DenseTorchKernel()]
    use = KernelUse(device=CPU, dtype=dtype, rows=range(1, 17))

    def prepare(weight: LinearWeight) -> PreparedWeight:
        kernel = next(k for k in kernels if k.supports(weight, use))
        return PreparedWeight(weight=kernel.prepare(weight), kernels=(kernel,) * len(ROW_RANGES))

    return prepare


def load(folder: Path, kind: str, dtype: torch.dtype, offload: Offload | None) -> Decoder:
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        config = load_model_config(folder, info)
        loaders = [FORMATS[kind].open(info), DenseFormat().open(info)]
        source = WeightSource(checkpoint, loaders, prepare_for(dtype), dtype, CPU)
        scale = config.head_dim**-0.5
        return build_decoder(
            config, source, lambda window: PagedCPUAttention(scale, window), 64, offload
        )


def logits(model: Decoder, dtype: torch.dtype) -> torch.Tensor:
    """Of a chunk of four tokens and of four tokens one by one: [8, V]."""
    shape = model.layers[0].attention.shape
    form, sizes = NativeKVCache(), {"num_kv_heads": shape.num_kv_heads, "block_size": 16}
    caches = []
    for _ in model.layers:
        stores = [
            form.allocate(
                KVCacheGeometry(side=side, head_dim=shape.head_dim, dtype=dtype, **sizes), 2, CPU
            )
            for side in ("k", "v")
        ]
        caches.append(
            LayerCache(k_format=form, v_format=form, k_store=stores[0], v_store=stores[1])
        )
    found = []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
        span = SequenceSpan(
            start=0, stop=stop - start, seq_len=stop, block_table=(1,), first_block=1
        )
        batch = ForwardBatch(
            token_ids=TOKENS[start:stop],
            positions=torch.arange(start, stop),
            slot_mapping=torch.arange(16 + start, 16 + stop),
            spans=(span,),
        )
        with torch.inference_mode():
            found.append(model.logits(model.hidden_states(batch, caches)))
    return torch.cat(found)


LINE = 64


def save_aligned(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A file whose tensors begin at whole cache lines when it is mapped, as copies of them do. On
    AMD's processors MKL adds in another order where a matrix begins between two vectors."""
    for spaces in range(0, LINE, 8):
        save_file(tensors, path, {"": " " * spaces})
        length = int.from_bytes(path.read_bytes()[:8], "little")
        if (8 + length) % LINE == 0:
            return
    raise AssertionError("no header's length fits")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, round_to_nearest: Any) -> dict[str, Path]:
    """A random Llama of five layers, dense, in AWQ, and in GPTQ with act-order; and a tiny EXL2."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )
    found = {"exl2": EXL2}
    for kind in ("dense", "awq", "gptq"):
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            linear, weight = name.removesuffix(".weight"), parameter.detach().clone()
            if kind == "dense" or not linear.endswith("_proj"):
                tensors[name] = weight
                continue
            order = torch.randperm(weight.shape[1])
            packed = (
                round_to_nearest.pack_awq_gemm(weight, 32)
                if kind == "awq"
                else round_to_nearest.pack_gptq(weight, 4, 32, False, order)
            )
            tensors |= {f"{linear}.{role}": tensor for role, tensor in packed.items()}
        found[kind] = tmp_path_factory.mktemp(kind)
        config = {**model.config.to_dict(), "torch_dtype": "float32"}
        if kind != "dense":
            config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 32}
        save_aligned(tensors, found[kind] / "model.safetensors")
        (found[kind] / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_the_same_bits_with_layers_in_host_memory(
    kind: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    wanted = logits(load(folders[kind], kind, dtype, None), dtype)
    assert wanted.isfinite().all()
    num_all = 2 if kind == "exl2" else 5
    for num_layers in range(1, num_all + 1):
        boundary = LateBoundary()
        model = load(folders[kind], kind, dtype, Offload(num_layers=num_layers, boundary=boundary))
        assert torch.equal(logits(model, dtype), wanted), num_layers
        streamed = [isinstance(layer, StreamedLayer) for layer in model.layers]
        assert streamed == [False] * (num_all - num_layers) + [True] * num_layers
        assert len(boundary.buffers) == min(2, num_layers)
        assert max(buffer.numel() for buffer in boundary.buffers) == max(boundary.hosted)


def test_the_next_layer_is_on_its_way_before_the_one_before_it_computes(
    folders: dict[str, Path],
) -> None:
    boundary = LateBoundary()
    model = load(folders["dense"], "dense", torch.float32, Offload(num_layers=4, boundary=boundary))
    logits(model, torch.float32)
    first, second = ("wait", 0), ("wait", 1)
    assert boundary.log[:4] == [("start", 0), ("start", 1), first, ("done", 0)]
    assert boundary.log[4:8] == [("start", 0), second, ("done", 1), ("start", 1)]
    # From the second step on, both buffers are filled before the step begins: what the last two
    # layers left is for the first two.
    steps = 5
    assert boundary.log.count(("start", 0)) == boundary.log.count(("start", 1)) == 2 * steps + 1
    assert boundary.log[-4:] == [("start", 0), second, ("done", 1), ("start", 1)]


def test_two_layers_stay_in_their_buffers(folders: dict[str, Path]) -> None:
    boundary = LateBoundary()
    offload = Offload(num_layers=2, boundary=boundary)
    logits(load(folders["awq"], "awq", torch.float32, offload), torch.float32)
    assert [what for what, _ in boundary.log].count("start") == 2


def test_nothing_of_a_streamed_layers_linears_is_left_outside_its_buffer(
    folders: dict[str, Path],
) -> None:
    boundary = LateBoundary()
    model = load(folders["gptq"], "gptq", torch.float32, Offload(num_layers=3, boundary=boundary))
    for number, layer in enumerate(model.layers[2:]):
        assert isinstance(layer, StreamedLayer)
        buffer = boundary.buffers[number % 2]
        end = buffer.data_ptr() + buffer.numel()
        orders = []
        for linear in find_linears(layer.layer):
            for part in linear.parts:
                for tensor in part.weight.tensors().values():
                    assert buffer.data_ptr() <= tensor.data_ptr() < end
                orders.append(part.weight.input_order)
        assert all(order is not None for order in orders)


def test_a_step_that_broke_off_in_a_streamed_layer_leaves_the_next_one_whole(
    folders: dict[str, Path],
) -> None:
    wanted = logits(load(folders["dense"], "dense", torch.float32, None), torch.float32)
    boundary = LateBoundary()
    model = load(folders["dense"], "dense", torch.float32, Offload(num_layers=5, boundary=boundary))
    third = model.layers[2]
    assert isinstance(third, StreamedLayer)
    third.stream.enter(0)
    third.stream.leave(0)
    third.stream.enter(1)  # and the layer raises: nobody leaves
    boundary.in_use.clear()
    boundary.under_way.clear()  # copies end in the order they began in: what was begun has ended
    assert torch.equal(logits(model, torch.float32), wanted)


def test_a_layout_of_a_kernels_own_is_refused_and_not_streamed_wrong(
    folders: dict[str, Path],
) -> None:
    kernel = MkldnnKernel()
    use = KernelUse(device=CPU, dtype=torch.bfloat16, rows=range(1, 17))

    def prepare(weight: LinearWeight) -> PreparedWeight:
        if not kernel.supports(weight, use):
            pytest.skip("this processor has no bf16 for oneDNN")
        return PreparedWeight(weight=kernel.prepare(weight), kernels=(kernel,) * 3)

    folder = folders["dense"]
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        loaders = [DenseFormat().open(info)]
        source = WeightSource(checkpoint, loaders, prepare, torch.bfloat16, CPU)
        offload = Offload(num_layers=1, boundary=LateBoundary())
        with pytest.raises(CapacityError, match="--offload-layers"):
            build_decoder(
                load_model_config(folder, info),
                source,
                lambda window: PagedCPUAttention(1.0, window),
                64,
                offload,
            )
