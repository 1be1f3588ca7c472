"""Makes AWQ quants, one block at a time.

Every block is calibrated on the unquantised model's activations, and a factor found for a linear's
inputs is folded into whatever gives them, so that readers need to know nothing of it.

Shape letters: N output features, K input features, T tokens, L tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch

from ingle.plugin import CheckpointInfo, LinearSite, Quantizer, QuantizerBlock
from ingle_quant_awq.making.fold import fold_into_linear, fold_into_norm
from ingle_quant_awq.making.grid import Grid, Rounded
from ingle_quant_awq.making.options import AwqOptions, dense_linears, settle_group_size
from ingle_quant_awq.making.search import clip, search_clip, search_scales

_NOT_CLIPPED: Final = ("q_", "k_", "query", "key", "Wqkv")
"""Names of projections whose products meet each other; clipping them did harm in AWQ's trials."""


class Seen:
    """A site's inputs: mean sizes over all tokens, and the first few tokens themselves.

    Attributes:
        x: float32 [T, K] of the tokens kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[torch.Tensor] = []
        self._kept = self._count = 0
        self._sizes: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """Takes ``x`` [T, K] in."""
        if not len(x):
            return
        sizes = x.abs().sum(0)
        self._sizes = sizes if self._sizes is None else self._sizes + sizes
        self._count += len(x)
        if self._kept < self._limit:
            part = x[: self._limit - self._kept].clone()
            self._parts.append(part)
            self._kept += len(part)

    @property
    def x(self) -> torch.Tensor | None:
        """The tokens kept, or None when none came: an expert that was never visited."""
        return torch.cat(self._parts) if self._parts else None

    def mean_size(self) -> torch.Tensor:
        """Mean absolute value of each input: float32 [K]."""
        assert self._sizes is not None
        return self._sizes / self._count


@dataclass(frozen=True, slots=True)
class _Search:
    """One search: linears that share a norm (or have one linear before them), and their inputs."""

    sites: tuple[LinearSite, ...]
    seen: Seen


class AwqQuantizer(Quantizer):
    """AWQ, or round-to-nearest into the same files."""

    carry: ClassVar[Literal["quantized", "original"]] = "original"

    def __init__(self, options: AwqOptions, source: CheckpointInfo) -> None:
        self.options = options
        self.calibrated = options.method == "awq"
        self._grid = Grid(options.bits, settle_group_size(options, source), options.sym)
        self._dense = dense_linears(source)
        self._stored_dtypes = source.tensor_dtypes

    def quantize_block(self, block: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Scales, clips and rounds the block's linears."""
        seen: dict[tuple[str, ...], Seen] = {}
        if self.calibrated:
            seen = self._observe(block)
            factors = self._scale(block, seen)
            if self.options.clip:
                self._clip(block, seen, factors)
        return {
            name: Rounded.of(block.weight(name), self._grid).tensors()
            for site in block.sites
            if site.quantizable
            for name in site.names
        }

    def _observe(self, block: QuantizerBlock) -> dict[tuple[str, ...], Seen]:
        rows = max(1, self.options.search_tokens // block.row_length)
        seen = {site.names: Seen(rows * block.row_length) for site in block.sites}
        block.observe(lambda site, x: seen[site.names].add(x))
        return seen

    def _scale(
        self, block: QuantizerBlock, seen: Mapping[tuple[str, ...], Seen]
    ) -> dict[tuple[str, ...], torch.Tensor]:
        """Finds and folds factors, one set of linears after another; gives each site's."""
        factors: dict[tuple[str, ...], torch.Tensor] = {}
        for search in _searches(block, seen):
            source = search.sites[0].source
            if source is None or search.seen.x is None:
                continue
            scales = self._search(block, search)
            if source.norm is not None:
                scales = fold_into_norm(block, source, scales, self._stored_dtypes)
            else:
                fold_into_linear(block, source, scales)
            for site in search.sites:
                factors[site.names] = scales
                for name in site.names:
                    block.set_weight(name, block.weight(name) * scales)
        return factors

    def _search(self, block: QuantizerBlock, search: _Search) -> torch.Tensor:
        names = [n for site in search.sites if site.quantizable for n in site.names]
        originals = [block.weight(name) for name in names]
        x = search.seen.x
        assert x is not None
        through_part = search.sites[0].source is not None and search.sites[0].source.norm

        def run() -> torch.Tensor:
            if through_part:
                return block.run_part(search.sites[0].part, x)
            return torch.cat([x @ block.weight(name).T for name in names], 1)

        wanted = run()

        def loss(weights: Sequence[torch.Tensor]) -> float:
            for name, weight in zip(names, weights, strict=True):
                block.set_weight(name, weight)
            return float((run() - wanted).square().mean())

        scales = search_scales(
            originals, search.seen.mean_size(), self._grid, loss, self.options.duo_scaling
        )
        for name, weight in zip(names, originals, strict=True):
            block.set_weight(name, weight)
        return scales

    def _clip(
        self,
        block: QuantizerBlock,
        seen: Mapping[tuple[str, ...], Seen],
        factors: Mapping[tuple[str, ...], torch.Tensor],
    ) -> None:
        for site in block.sites:
            x = seen[site.names].x
            if x is None or not site.quantizable:
                continue
            if site.names in factors:
                x = x / factors[site.names]
            for name in site.names:
                if not any(part in name.rpartition(".")[2] for part in _NOT_CLIPPED):
                    weight = block.weight(name)
                    bounds = search_clip(weight, x, self._grid)
                    block.set_weight(name, clip(weight, bounds, self._grid))

    def config(self) -> Mapping[str, Any]:
        """As AutoAWQ, transformers and vLLM read it."""
        return {
            "quant_method": "awq",
            "bits": self.options.bits,
            "group_size": self._grid.group_size,
            "zero_point": not self.options.sym,
            "version": "gemm",
            "modules_to_not_convert": [*self._dense, "lm_head"],
            "meta": {
                "quantizer": "ingle",
                "method": self.options.method,
                "duo_scaling": self.options.duo_scaling,
                "clip": self.options.clip,
            },
        }

    def files(self) -> Mapping[str, str]:
        """``quant_config.json``, as AutoAWQ and llm-awq spell it."""
        spelt = {
            "zero_point": not self.options.sym,
            "q_group_size": self._grid.group_size,
            "w_bit": self.options.bits,
            "version": "GEMM",
        }
        return {"quant_config.json": json.dumps(spelt, indent=2) + "\n"}

    def summary(self) -> str:
        """What was done."""
        size = self._grid.group_size
        group = "one group" if size == -1 else f"groups of {size}"
        kind = "symmetric" if self.options.sym else "with zero points"
        if not self.calibrated:
            return (
                f"Rounded to nearest: {self.options.bits} bits, {group}, {kind}, in AWQ's layout."
            )
        clipped = "scaled and clipped" if self.options.clip else "scaled"
        return f"AWQ: {self.options.bits} bits, {group}, {kind}, {clipped}."


def _searches(block: QuantizerBlock, seen: Mapping[tuple[str, ...], Seen]) -> list[_Search]:
    """Sites that read one norm go together, experts and routers included, with the inputs of the
    part as a whole; every other site goes alone."""
    searches: list[_Search] = []
    by_norm: dict[str, list[LinearSite]] = {}
    for site in block.sites:
        norm = site.source.norm if site.source is not None else None
        if norm is None:
            searches.append(_Search((site,), seen[site.names]))
        elif norm in by_norm:
            by_norm[norm].append(site)
        else:
            by_norm[norm] = [site]
    # The part's first site sees all of its input; an expert sees its own tokens.
    whole = [_Search(tuple(sites), seen[sites[0].names]) for sites in by_norm.values()]
    return [*whole, *searches]
