"""What each option of each part of a block would cost in bits and in error.

Letters: N output features, K input features, T tokens, L tokens of a row, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ingle.plugin import LinearSite, QuantizerBlock
from ingle.quantize.hessian import Hessian
from ingle_quant_exl2.making.block_linears import (
    TABLES,
    BlockLinear,
    linears,
    part_linears,
    quantised_sites,
)
from ingle_quant_exl2.making.options import BitPlan
from ingle_quant_exl2.making.site_pass import SiteInput, in_place, quantise_site

MEASURED_TOKENS: Final = 1024
"""Tokens an option's output is compared on; second moments are taken from all."""
SEARCH_STRIDE: Final = 8
"""Scales are searched coarsely here and finely around the best: a third of the work."""
LEAST_ERROR: Final = 1e-6

Trials = Mapping[tuple[str, BitPlan], torch.Tensor]
"""Dequantised weights [N, K], float16 (which is what they are), by linear and plan."""


def gather_hessians(block: QuantizerBlock) -> dict[tuple[str, ...], torch.Tensor]:
    """The second moments of every quantised site's inputs [K, K], by the site's names."""
    hessians: dict[tuple[str, ...], Hessian] = {}

    def see(site: LinearSite, x: torch.Tensor) -> None:
        if site.quantizable:
            held = hessians.setdefault(site.names, Hessian(x.shape[1], x.device))
            held.add(x)

    block.observe(see)
    return {names: hessian.matrix().cpu() for names, hessian in hessians.items()}


def measure(block: QuantizerBlock, calibrated: bool) -> dict[str, Any]:
    """Per part: weights, and bits and error of every option.

    The error is that of the part's output with the residual it joins, relative to that sum, mean
    over tokens; without calibration that of the weights.
    """
    if not calibrated:
        return {part: _weigh(block, part) for part in TABLES}
    first_inputs = _FirstInputs(block)
    hessians = first_inputs.observe()
    residual = first_inputs.residual
    found: dict[str, Any] = {}
    for part in TABLES:
        x = first_inputs.of(part)
        reference = block.run_part(part, x) + residual
        errors = _part_errors(block, part, hessians, (x, residual, reference))
        found[part] = _record(part_linears(block, part), part, errors)
        residual = reference
    return found


class _FirstInputs:
    """What enters each part of a block on the first tokens of the calibration."""

    def __init__(self, block: QuantizerBlock) -> None:
        self._block = block
        rows = max(1, MEASURED_TOKENS // block.row_length)
        self._num_tokens = rows * block.row_length
        self._parts: dict[str, list[torch.Tensor]] = {part: [] for part in TABLES}
        self._firsts = {part: self._first_site(part) for part in TABLES}

    def _first_site(self, part: str) -> tuple[str, ...]:
        """The site that reads the part's input: a router too, where there is one."""
        return next(site.names for site in self._block.sites if site.part == part)

    def observe(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Runs the block; gives the second moments of its sites."""
        hessians: dict[tuple[str, ...], Hessian] = {}

        def see(site: LinearSite, x: torch.Tensor) -> None:
            if site.quantizable:
                hessians.setdefault(site.names, Hessian(x.shape[1], x.device)).add(x)
            kept = self._parts[site.part]
            if site.names == self._firsts[site.part]:
                missing = self._num_tokens - sum(len(part) for part in kept)
                if missing > 0:
                    kept.append(x[:missing].clone())

        self._block.observe(see)
        return {names: hessian.matrix().cpu() for names, hessian in hessians.items()}

    def of(self, part: str) -> torch.Tensor:
        """float32 [T, E]."""
        return torch.cat(self._parts[part])

    @property
    def residual(self) -> torch.Tensor:
        """What the first part's output is added to: float32 [T, E]."""
        hidden = self._block.hidden
        assert hidden is not None
        x = self._parts["attention"][0]
        return hidden[: self._num_tokens].to(x)


def _part_errors(
    block: QuantizerBlock,
    part: str,
    hessians: Mapping[tuple[str, ...], torch.Tensor],
    signals: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> list[float]:
    """The error of every option; the block is left as it was."""
    x, residual, reference = signals
    trials = _trials(block, part, hessians)
    originals = {item.name: block.weight(item.name) for item in part_linears(block, part)}
    errors = []
    for option in TABLES[part]:
        for item in part_linears(block, part):
            block.set_weight(item.name, trials[item.name, option[item.key]].float())
        found = block.run_part(part, x) + residual
        errors.append(_relative(found, reference))
    for name, weight in originals.items():
        block.set_weight(name, weight)
    return errors


def _trials(
    block: QuantizerBlock, part: str, hessians: Mapping[tuple[str, ...], torch.Tensor]
) -> Trials:
    """Every linear of the part under every plan that any option has for it."""
    trials: dict[tuple[str, BitPlan], torch.Tensor] = {}
    for site in quantised_sites(block, part):
        items = linears(block, site)
        hessian = hessians.get(site.names)
        seen = SiteInput.of(torch.eye(items[0].in_features) if hessian is None else hessian)
        wanted = [(item, plan) for item in items for plan in _plans(part, item)]
        weights = [(block.weight(item.name), plan) for item, plan in wanted]
        made = quantise_site(seen, weights, SEARCH_STRIDE)
        for (item, plan), quantised in zip(wanted, made, strict=True):
            weight = in_place(quantised, seen, item.out_features)
            trials[item.name, plan] = weight.half()
    return trials


def _plans(part: str, item: BlockLinear) -> list[BitPlan]:
    return list(dict.fromkeys(option[item.key] for option in TABLES[part]))


def _weigh(block: QuantizerBlock, part: str) -> dict[str, Any]:
    """The record of a part from its weights alone, rounded to nearest."""
    items = part_linears(block, part)
    squares: dict[tuple[str, BitPlan], float] = {}
    total = 0.0
    for item in items:
        weight = block.weight(item.name).cpu()
        total += float(weight.square().sum())
        seen = SiteInput.unknown(item.in_features)
        plans = _plans(part, item)
        made = quantise_site(seen, [(weight, plan) for plan in plans], SEARCH_STRIDE)
        for plan, quantised in zip(plans, made, strict=True):
            error = in_place(quantised, seen, item.out_features) - weight
            squares[item.name, plan] = float(error.square().sum())
    errors = [
        (sum(squares[item.name, option[item.key]] for item in items) / max(total, 1e-30)) ** 0.5
        for option in TABLES[part]
    ]
    return _record(items, part, errors)


def _record(items: list[BlockLinear], part: str, errors: list[float]) -> dict[str, Any]:
    return {
        "weights": sum(item.out_features * item.in_features for item in items),
        "bits": [sum(item.bits(option) for item in items) for option in TABLES[part]],
        "errors": [max(LEAST_ERROR, error) for error in errors],
    }


def _relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean over tokens of the relative error of [T, E].

    exllamav2 takes norms over whole rows. A few tokens of a row, the first above all, can be
    hundreds of times as large as the rest, and then all that is seen is how well those are kept:
    the middle layers of SmolLM2 looked as if 2 bits did them no harm.
    """
    size = reference.norm(dim=1).clamp_min(LEAST_ERROR)
    return float(((found - reference).norm(dim=1) / size).mean())
