"""How an 8B model (Llama 3's shapes, 4 bits) is launched on cards that nobody has measured; also
prints the table of docs/kernels.md.

PYTHONPATH=core/src:plugins/quant_exl2/src python tests/kernels/default_launches.py
"""

from __future__ import annotations

import torch

from ingle.attention.decode_launches import DecodeLaunches
from ingle.builtin.affine_triton import PackedW4, default_w4_config
from ingle.engine.absent_card import COMPUTE
from ingle_quant_exl2.kernel import default_splits
from ingle_quant_exl2.planes import PackedExl2, find_sections

CARDS = ("RTX 3060", "RTX 3090", "RTX 4070", "RTX 4090", "RTX 5090", "A100", "H200")
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
SEQUENCES = (1, 4, 32)


def w4_cell(n: int, k: int, num_sms: int) -> str:
    """Output features of a program x programs along K."""
    packed = PackedW4(
        words=torch.empty(n // 16, k // 128, 2, 32, 8, dtype=torch.int16, device="meta"),
        scales=torch.empty(0), zeros=None, out_features=n, in_features=k, group_size=128,
    )  # fmt: skip
    config = default_w4_config(packed, num_sms)
    return f"{config.block_n} x {config.splits}"


def exl2_cell(n: int, k: int, num_sms: int) -> str:
    """Programs along K."""
    nothing = torch.empty(0)
    packed = PackedExl2(
        words=torch.empty(n // 16, k // 64, 32, 8, dtype=torch.int16, device="meta"),
        scale_codes=nothing, group_scale=nothing, work=nothing, out_features=n, in_features=k,
        sections=find_sections([4] * (k // 128), [128] * (k // 128)),
    )  # fmt: skip
    return str(default_splits(packed, num_sms))


def table() -> list[str]:
    """Markdown: a row per card."""
    heads = [f"{name} {n} x {k}" for name, (n, k) in SHAPES.items()]
    heads += [f"attention, {size} sequences" for size in SEQUENCES]
    lines = ["| card | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for card in CARDS:
        num_sms = COMPUTE[card][1]
        cells = [
            f"{w4_cell(n, k, num_sms)} / {exl2_cell(n, k, num_sms)}" for n, k in SHAPES.values()
        ]
        launches = DecodeLaunches(num_sms=num_sms)
        cells += [str(launches(size, 8, 128, 4).splits) for size in SEQUENCES]
        lines.append(f"| {card} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
