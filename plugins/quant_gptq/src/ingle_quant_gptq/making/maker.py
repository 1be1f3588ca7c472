"""Makes GPTQ quants, one block at a time.

Shape letters: N output features, K input features, T tokens, G groups, b bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Final, Literal

import torch

from ingle.plugin import LinearSite, Quantizer, QuantizerBlock
from ingle.plugin.affine_packing import pack_bits
from ingle.quantize.hessian import Hessian
from ingle_quant_gptq.making.options import GptqOptions
from ingle_quant_gptq.making.solve import Solved, round_to_nearest, solve

LEAST_SHARE: Final = 0.005
"""An expert that sees less of the calibration is rounded to nearest: its Hessian says nothing."""
_LAST_OF_PART: Final = ("o_proj", "down_proj", "w2")


class GptqQuantizer(Quantizer):
    """GPTQ, or round-to-nearest into the same files."""

    carry: ClassVar[Literal["quantized", "original"]] = "quantized"

    def __init__(self, options: GptqOptions) -> None:
        self.options = options
        self.calibrated = options.method == "gptq"
        rules = [changes or {} for changes in options.rules().values()]
        self._true_zeros = not all([options.sym, *(rule.get("sym", True) for rule in rules)])

    def quantize_block(self, block: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The block's linears; the block then computes with the quantised ones."""
        packed: dict[str, Mapping[str, torch.Tensor]] = {}
        for stage in self._stages(block):
            hessians = self._observe(block, stage)
            for site in stage:
                packed.update(self._quantize_site(block, site, hessians.get(site.names)))
        return packed

    def quantize_head(self, head: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The output head, where it was asked for."""
        return self.quantize_block(head) if self.options.lm_head else {}

    def _stages(self, block: QuantizerBlock) -> Iterable[Sequence[LinearSite]]:
        """Sites that are quantised over the same inputs; with ``true_sequential`` a part's last
        linears see what the ones before them have become."""
        sites = [site for site in block.sites if site.quantizable]
        if not self.options.true_sequential or not self.calibrated:
            return [sites]
        stages: dict[tuple[str, bool], list[LinearSite]] = {}
        for site in sites:
            is_last = site.names[0].endswith(_LAST_OF_PART)
            stages.setdefault((site.part, is_last), []).append(site)
        return stages.values()

    def _observe(
        self, block: QuantizerBlock, stage: Sequence[LinearSite]
    ) -> dict[tuple[str, ...], Hessian]:
        if not self.calibrated:
            return {}
        hessians = {
            site.names: Hessian(weight.shape[1], weight.device)
            for site in stage
            for weight in [block.weight(site.names[0])]
        }

        def see(site: LinearSite, x: torch.Tensor) -> None:
            if site.names in hessians:
                hessians[site.names].add(x)

        block.observe(see, stage[-1])
        most = max(hessian.num_tokens for hessian in hessians.values())
        return {k: h for k, h in hessians.items() if h.num_tokens > LEAST_SHARE * most}

    def _quantize_site(
        self, block: QuantizerBlock, site: LinearSite, hessian: Hessian | None
    ) -> dict[str, Mapping[str, torch.Tensor]]:
        """Linears of one site with equal options are solved as one matrix."""
        alike: dict[GptqOptions, list[str]] = {}
        for name in site.names:
            options = self.options.of_module(name)
            if options is not None:
                alike.setdefault(options, []).append(name)
        packed: dict[str, Mapping[str, torch.Tensor]] = {}
        for options, names in alike.items():
            weights = [block.weight(name) for name in names]
            joined = torch.cat(weights)
            solved = (
                round_to_nearest(joined, options)
                if hessian is None
                else solve(joined, hessian.matrix(), options)
            )
            start = 0
            for name, weight in zip(names, weights, strict=True):
                part = solved.rows(start, start + len(weight))
                start += len(weight)
                block.set_weight(name, part.dequantize())
                packed[name] = pack(part, options.bits, self._true_zeros)
        return packed

    def config(self) -> Mapping[str, Any]:
        """As GPTQModel, AutoGPTQ, optimum, transformers and vLLM read it."""
        options = self.options
        rules = {k: {} if v is None else dict(v) for k, v in options.rules().items()}
        return {
            "quant_method": "gptq",
            "bits": options.bits,
            "group_size": options.group_size,
            "desc_act": options.desc_act and self.calibrated,
            "static_groups": options.static_groups,
            "sym": options.sym,
            "true_sequential": options.true_sequential,
            "damp_percent": options.damp_percent,
            "lm_head": options.lm_head,
            "pack_dtype": "int32",
            "checkpoint_format": "gptq_v2" if self._true_zeros else "gptq",
            "dynamic": rules or None,
            "meta": {
                "quantizer": f"ingle:{_version()}",
                "method": options.method,
                "mse": options.mse,
                "act_group_aware": options.act_group_aware and not options.desc_act,
            },
        }

    def files(self) -> Mapping[str, str]:
        """``quantize_config.json``, which older readers look for first."""
        return {"quantize_config.json": json.dumps(self.config(), indent=2) + "\n"}

    def summary(self) -> str:
        """What was done."""
        options = self.options
        kind = "symmetric" if options.sym else "asymmetric"
        group = "one group" if options.group_size == -1 else f"groups of {options.group_size}"
        if not self.calibrated:
            return f"Rounded to nearest: {options.bits} bits, {group}, {kind}, in GPTQ's layout."
        if options.desc_act:
            order = "act-order"
        else:
            order = "group-aware order" if options.act_group_aware else "natural order"
        return f"GPTQ: {options.bits} bits, {group}, {kind}, {order}."


def pack(solved: Solved, bits: int, true_zeros: bool) -> dict[str, torch.Tensor]:
    """A linear's tensors: codes packed along the inputs, zero points along the outputs.

    Symmetric files have the first version's convention, zero points less one. Asymmetric ones have
    the second's, zero points as they are (``true_zeros``): the first loses a 0 in some readers.
    """
    zeros = solved.zeros if true_zeros else solved.zeros - 1
    return {
        "qweight": pack_bits(solved.codes, bits).T.contiguous(),
        "qzeros": pack_bits(zeros, bits),
        "scales": solved.scales.half().contiguous(),
        "g_idx": solved.group_ids,
    }


def _version() -> str:
    try:
        return version("ingle-quant-gptq")
    except PackageNotFoundError:
        return "0"
