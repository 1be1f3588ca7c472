"""The kernel variants whose cost is watched, as compile jobs; also prints the table of docs.

PYTHONPATH=core/src:plugins/quant_exl2/src:plugins/kv_fp8/src python tests/kernels/variants.py
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import triton.language as tl
from figures import ALLOWED, figure_of

from ingle.attention.decode_launches import tiles as tiles_of_decode
from ingle.attention.paged_kernel import paged_attention_kernel
from ingle.attention.paged_triton import (
    Softmax,
    decode_config,
    most_registers,
    padded,
    prompt_config,
)
from ingle.builtin.affine_triton import w4_decode_kernel
from ingle.builtin.kv_int_triton import read_int4, read_int8
from ingle.builtin.kv_native_triton import read_native
from ingle.builtin.tile_triton import MOST_REGISTERS, tile_kernel
from ingle.builtin.w4_tuning import BLOCKS as W4_BLOCKS
from ingle.builtin.w4_tuning import SPLITS as W4_SPLITS
from ingle.plugin.affine_decode import decode_affine
from ingle.testing.triton_compile import (
    ARCHITECTURES,
    CompileReport,
    compile_alike,
    compile_kernel,
    ptx_of,
)
from ingle_kv_fp8.triton_io import read_e4m3, read_e5m2
from ingle_quant_exl2.kernel import exl2_decode_kernel
from ingle_quant_exl2.kernel import most_registers as most_registers_exl2
from ingle_quant_exl2.tiles import decode_exl2
from ingle_quant_exl2.tuning import BLOCKS as EXL2_BLOCKS
from ingle_quant_exl2.tuning import SPLITS as EXL2_SPLITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with one set of constants.

    Attributes:
        items_per_lane: Weights, or elements of keys and values, per lane and loop iteration.
        budget: Most instructions per item the main loop may take.
        max_registers: What the assembler is told a thread may take; None leaves it to it.
    """

    name: str
    kernel: Any
    signature: str
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    items_per_lane: float
    budget: float
    max_registers: int | None = None

    def most(self, arch: int) -> float:
        """Most instructions per item on ``arch``: the budget, and a tenth above the design's figure
        where it has one."""
        figure = figure_of(self.name, arch)
        if figure is None:
            return self.budget
        return min(self.budget, ALLOWED * figure)

    def compile(self, arch: int) -> CompileReport:
        return compile_kernel(
            self.kernel,
            self.signature,
            self.constants,
            arch=arch,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            maxnreg=self.max_registers,
        )

    def compile_alike(self, archs: Sequence[int]) -> list[CompileReport]:
        """The same for several, see ``triton_compile.compile_alike``."""
        return compile_alike(
            self.kernel,
            self.signature,
            self.constants,
            archs=archs,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            maxnreg=self.max_registers,
        )

    def ptx(self, arch: int) -> str:
        return ptx_of(
            self.kernel,
            self.signature,
            self.constants,
            arch=arch,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            maxnreg=self.max_registers,
        )


def w4(name: str, budget: float, **changes: Any) -> Variant:
    """4096 x 4096, group 128, split 8 ways, unless changed."""
    constants = {
        "N": 4096, "NP": 4096, "K": 4096, "CHUNKS": 32, "GS": 128, "X_STRIDE": 4096, "BN": 32,
        "BM": 8, "SPLITS": 6, "PREFETCH": True, "HAS_ZEROS": True, "HAS_RESIDUAL": True,
        "BF16": False, "ASM": True,
    }  # fmt: skip
    constants |= changes
    x = "*bf16:16" if constants["BF16"] else "*fp16:16"
    zeros = "*fp16:16" if constants["HAS_ZEROS"] else "None"
    signature = (
        f"x={x},words=*i16:16,scales=*fp16:16,zeros={zeros},out={x},residual={x},"
        "partials=*fp32:16,counters=*i32:16,M=i32"
    )
    return Variant(
        name=f"W4 {name}",
        kernel=w4_decode_kernel,
        signature=signature,
        constants=constants,
        num_warps=1,
        num_stages=1,
        items_per_lane=constants["BN"] * 128 / 32,
        budget=budget,
    )


def exl2(name: str, budget: float, kinds: tuple[tuple[int, int], ...], **changes: Any) -> Variant:
    """4096 features, split 8 ways; ``kinds``: (bits, group size)."""
    constants = {
        "N": 4096, "NP": 4096, "BLOCKS": 64, "KINDS": kinds, "X_STRIDE": 4096, "BN": 32, "BM": 8,
        "SPLITS": 8, "HAS_RESIDUAL": True, "BF16": False, "ASM": True,
    }  # fmt: skip
    constants |= changes
    x = "*bf16:16" if constants["BF16"] else "*fp16:16"
    signature = (
        f"x={x},words=*i16:16,scale_codes=*u8:16,group_scale=*fp32:16,work=*i32:16,out={x},"
        f"residual={x},partials=*fp32:16,counters=*i32:16,M=i32"
    )
    return Variant(
        name=f"EXL2 {name}",
        kernel=exl2_decode_kernel,
        signature=signature,
        constants=constants,
        num_warps=1,
        num_stages=1,
        items_per_lane=constants["BN"] * 256 / 32,
        budget=budget,
        max_registers=most_registers_exl2(len(kinds), constants["BM"]),
    )


def _side(form: str, dim: int, is_value: bool, by_card: bool, dtype: str) -> tuple[Any, ...]:
    """Signature, read function and META of one side."""
    if form == "native":
        return f"({dtype}:16)", read_native, (8, is_value)
    if form == "int8":
        return f"(*i8:16 {dtype}:16)", read_int8, (8, is_value, 1, True)
    if form == "int4":
        return f"(*u8:16 {dtype}:16)", read_int4, (8, is_value, dim // gcd(dim, 32), True)
    read = read_e4m3 if form == "e4m3" else read_e5m2
    return "(*u8:16 *fp32:16)", read, (8, is_value, by_card, True)


def attention(
    budget: float,
    form: str = "native",
    head_dim: int = 128,
    dtype: str = "fp16",
    *,
    prompt: bool = False,
    by_card: bool = False,
    tile: tuple[int, int] | None = None,
    **changes: Any,
) -> Variant:
    """32 query heads on 8, pages of 256, as the engine launches it; unless changed. ``tile``:
    tokens and warps of a decode step."""
    page = changes.get("PAGE", 256)
    config = decode_config(head_dim, 4, 8)
    if prompt:
        config = prompt_config(head_dim, page, is_large=form == "int4")
    if tile is not None:
        config = replace(config, block_tokens=tile[0], num_warps=tile[1])
    name = f"{form}, D {head_dim}, {dtype}" + (", prompt" if prompt else "")
    name += "" if tile is None else f", tile {tile}"
    name += "".join(f", {key.lower()} {value}" for key, value in changes.items())
    k, k_read, k_meta = _side(form, head_dim, False, by_card, f"*{dtype}")
    v, v_read, v_meta = _side(form, head_dim, True, by_card, f"*{dtype}")
    constants = {
        "K_READ": k_read, "K_META": k_meta, "V_READ": v_read, "V_META": v_meta, "HQ": 32, "HK": 8,
        "D": head_dim, "DP": padded(head_dim), "PAGE": page, "BM": config.block_rows,
        "BN": config.block_tokens, "SPLITS": config.splits, "STAGES": config.num_stages,
        "WINDOW": 0, "SOFTCAP": False,
    }  # fmt: skip
    # without a split the launcher hands over the output in place of what merging needs
    merging = "partials=*fp32:16,stats=*fp32:16,counters=*i32:16"
    if config.splits == 1:
        merging = ",".join(f"{name}=*{dtype}:16" for name in ("partials", "stats", "counters"))
    signature = (
        f"query=*{dtype}:16,k_side={k},v_side={v},block_table=*i32:16,seq_lens=*i32:16,"
        f"row_starts=*i32:16,new_lens=*i32:16,out=*{dtype}:16,{merging},softmax_scale=fp32,"
        "softcap=fp32,table_stride=i32"
    )
    constants |= changes
    bound = Softmax(
        scale=1.0, window=constants["WINDOW"], softcap=5.0 if constants["SOFTCAP"] else None
    )
    return Variant(
        name=f"attention {name}",
        kernel=paged_attention_kernel,
        signature=signature,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        items_per_lane=2 * config.block_tokens * head_dim / (32 * config.num_warps),
        budget=budget,
        max_registers=most_registers(constants["PAGE"], head_dim, config, bound),
    )


AFFINE = "(*i32:16 *fp16:16 *u8:16 *i32:16)"
EXL2 = "(*i32:16 *i32:16 *fp16:16 *i32:16 *i32:16)"


def tiles(name: str, budget: float, dtype: str = "fp16", **changes: Any) -> Variant:
    """4096 x 4096, affine, 4 bits in groups of 128, up to 16 rows split 8 ways, unless changed."""
    constants = {
        "DECODE": decode_affine, "META": (4, 1, 128), "N": 4096, "K": 4096,
        "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype], "BM": 16,
        "BN": 32, "BK": 64, "SPLITS": 8, "HAS_RESIDUAL": False,
    }  # fmt: skip
    constants |= changes
    tensors = AFFINE if constants["DECODE"] is decode_affine else EXL2
    signature = (
        f"x=*{dtype}:16,tensors={tensors},out=*{dtype}:16,residual=None,partials=*fp32:16,"
        "counters=*i32:16,M=i32,K0=i32:16,K1=i32:16,X_STRIDE=i32:16"
    )
    return Variant(
        name=f"tiles {name}, {dtype}",
        kernel=tile_kernel,
        signature=signature,
        constants=constants,
        num_warps=4,
        num_stages=3,
        items_per_lane=constants["BN"] * constants["BK"] / 128,
        budget=budget,
        max_registers=MOST_REGISTERS,
    )


QUICK = (
    w4("1-8 rows", 2.1),
    exl2("2.5 bit, g64", 2.2, ((2, 64), (3, 64))),
    attention(3.0),
)
FULL = (
    w4("1-8 rows, bf16", 2.5, BF16=True),
    w4("1-8 rows, g32", 2.9, GS=32, PREFETCH=False),
    w4("1-8 rows, g64", 2.4, GS=64, PREFETCH=False),
    exl2("3 bit, g64", 3.4, ((3, 64),)),
    exl2("6 bit, g128", 3.2, ((6, 128),)),
    w4("1-8 rows, block 64", 2.0, BN=64),
    w4("1-8 rows, no prefetch", 2.0, PREFETCH=False),
    w4("1-8 rows, no zeros", 2.1, HAS_ZEROS=False),
    w4("16 rows", 2.5, BM=16),
    w4("32 rows", 2.9, BM=32, PREFETCH=False),
    w4("32 rows, 16 splits", 2.9, BM=32, PREFETCH=False, SPLITS=16),
    w4(
        "K 576, g64",
        2.6,
        N=576,
        NP=576,
        K=576,
        CHUNKS=5,
        GS=64,
        X_STRIDE=576,
        SPLITS=1,
        PREFETCH=False,
    ),
    exl2("2 bit, g128", 1.9, ((2, 128),)),
    exl2("3 bit, g128", 3.2, ((3, 128),)),
    exl2("4 bit, g128", 2.1, ((4, 128),)),
    exl2("5 bit, g128", 3.2, ((5, 128),)),
    exl2("8 bit, g128", 2.4, ((8, 128),)),
    exl2("3 bit, g32", 3.8, ((3, 32),)),
    attention(3.0, PAGE=16),
    exl2("4 bit, g128, bf16", 3.6, ((4, 128),), BF16=True),
    exl2("4 bit, g128, 16 rows", 2.4, ((4, 128),), BM=16),
    exl2("4 bit, g128, 32 rows, 16 splits", 3.2, ((4, 128),), BM=32, SPLITS=16),
    exl2("8 + 4 + 3 bit", 3.1, ((3, 128), (4, 128), (8, 32))),
    tiles("4 bit", 60, "fp16"),
    tiles("4 bit", 60, "bf16"),
    tiles("4 bit", 60, "fp32"),
    tiles("4 bit, 64 rows", 60, "fp16", BM=64, SPLITS=1),
    tiles("3 bit", 60, "fp16", META=(3, 1, 128)),
    tiles("8 bit", 60, "fp16", META=(8, 0, 128)),
    tiles("EXL2 4 bit", 60, "fp32", DECODE=decode_exl2, META=(4,)),
)


def quick_variants(arch: int) -> tuple[Variant, ...]:
    """The few that are compiled on every run; e4m3 by the card from sm_89 on."""
    return (*QUICK, attention(6.0, "e4m3", by_card=arch >= 89))


def full_variants(arch: int) -> tuple[Variant, ...]:
    """All others of the table that run on ``arch``."""
    return (*FULL, attention(6.0, "e4m3", by_card=arch >= 89, PAGE=16))


def every_attention(arch: int) -> tuple[Variant, ...]:
    """All that the engine launches, by format, head size, dtype and kind."""
    forms = ("native", "e4m3", "e5m2", "int8", "int4")
    sizes = (64, 80, 96, 112, 128, 192, 256)
    changes: tuple[dict[str, Any], ...] = ({}, {"WINDOW": 1024, "SOFTCAP": True}, {"PAGE": 16})
    return tuple(
        attention(99, form, size, dtype, prompt=prompt, by_card=arch >= 89, **change)
        for number, (form, size, prompt, change) in enumerate(
            itertools.product(forms, sizes, (False, True), changes)
        )
        for dtype in (("fp16", "bf16")[number % 2],)
    )


def tuned_products() -> Iterator[Variant]:
    """Every product that a tuner may choose, with every tile of rows, split most ways."""
    rows, types = (8, 16, 32), (False, True)
    for block, bm, group, bf16 in itertools.product(W4_BLOCKS, rows, (32, 64, 128), types):
        if block == 64 and bm > 8:
            continue  # the launcher makes two programs of it
        prefetch = group == 128 and bm <= 16
        for ahead in sorted({prefetch, False}):
            name = f"block {block}, {bm} rows, g{group}, bf16 {bf16}, prefetch {ahead}"
            yield w4(
                name,
                99,
                BN=block,
                BM=bm,
                GS=group,
                BF16=bf16,
                PREFETCH=ahead,
                SPLITS=max(W4_SPLITS),
            )
    mixed = tuple((bits, 32) for bits in (2, 3, 4, 5, 6, 8))
    for block, bm, kinds, bf16 in itertools.product(
        EXL2_BLOCKS, rows, (((8, 128), (4, 128), (3, 32)), mixed), types
    ):
        if block == 16 and bm == 32:
            continue  # the launcher makes one program of two
        name = f"block {block}, {bm} rows, {len(kinds)} kinds, bf16 {bf16}"
        yield exl2(name, 99, kinds, BN=block, BM=bm, BF16=bf16, SPLITS=max(EXL2_SPLITS))


def tuned_attention(arch: int) -> Iterator[Variant]:
    """Every tile that the tuner of decode steps may choose."""
    forms = ("native", "e4m3", "e5m2", "int8", "int4")
    for form, size, page in itertools.product(forms, (64, 80, 96, 112, 128), (256, 16)):
        changes = {} if page == 256 else {"PAGE": page}
        for number, (tokens, warps) in enumerate(tiles_of_decode(size)):
            dtype = ("fp16", "bf16")[(number + size // 16) % 2]
            yield attention(
                99, form, size, dtype, by_card=arch >= 89, tile=(tokens, warps), **changes
            )


def tuned_variants(arch: int) -> tuple[Variant, ...]:
    """All that a tuner may choose on ``arch``."""
    return (*tuned_products(), *tuned_attention(arch))


def cell(variant: Variant, report: CompileReport) -> str:
    """Registers / bytes of shared memory / bytes spilled / resident warps per SM / instructions per
    item of the main loop."""
    numbers = (report.registers, report.shared_bytes, report.spill_bytes, report.warps_per_sm)
    return (
        " / ".join(map(str, numbers))
        + f" / {report.loop_instructions / variant.items_per_lane:.2f}"
    )


def print_table() -> None:
    """Markdown: a row per variant, a cell (``cell``) per architecture."""
    print("| kernel | " + " | ".join(f"sm_{arch}" for arch in ARCHITECTURES) + " |")
    print("|---|" + "---|" * len(ARCHITECTURES))
    columns = [(*quick_variants(arch), *full_variants(arch)) for arch in ARCHITECTURES]
    for row in zip(*columns, strict=True):
        cells = []
        for arch, variant in zip(ARCHITECTURES, row, strict=True):
            cells.append(cell(variant, variant.compile(arch)))
        print(f"| {row[0].name} | " + " | ".join(cells) + " |")
        sys.stdout.flush()


if __name__ == "__main__":
    print_table()
