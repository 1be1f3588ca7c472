"""Makes EXL2 quants: measures, chooses, quantises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F

from ingle.plugin import CheckpointError, ConfigError, Quantizer, QuantizerBlock
from ingle_quant_exl2.making.allocate import Choice, allocate
from ingle_quant_exl2.making.block_linears import TABLES, linears, part_linears, quantised_sites
from ingle_quant_exl2.making.measure import gather_hessians, measure
from ingle_quant_exl2.making.options import HEAD, BitPlan, padded
from ingle_quant_exl2.making.settings import Exl2Options
from ingle_quant_exl2.making.site_pass import SiteInput, in_place, quantise_site

PEER_VERSION: Final = "0.3.2"
"""The version of exllamav2 whose files these are like."""
MEASUREMENT_FILE: Final = "measurement.json"
KIND: Final = "ingle-exl2-measurement-2"

Made = dict[str, dict[str, torch.Tensor]]


class Exl2Quantizer(Quantizer):
    """One EXL2 quant."""

    carry: ClassVar[Literal["quantized", "original"]] = "quantized"
    file_stem: ClassVar[str] = "output"
    dense_dtype: ClassVar[Literal["source", "float16"]] = "float16"

    def __init__(self, options: Exl2Options) -> None:
        self._options = options
        self.calibrated = options.method == "gptq"
        self._reused = _read_measurement(options)
        self.measures = self._reused is None
        self._measured: list[Mapping[str, Any]] = []
        self._chosen: dict[tuple[int, str], int] = {}

    def measure_block(self, block: QuantizerBlock) -> Mapping[str, Any]:
        """Bits and error of every option of every part; nothing of the head."""
        return {} if self._is_head(block) else measure(block, self.calibrated)

    def plan(self, measurements: Sequence[Mapping[str, Any]]) -> None:
        """Chooses an option for every part of every block.

        Raises:
            ConfigError: When the target is below what the smallest layouts take, or the
                measurement is of another model.
        """
        measured = list(measurements) if self._reused is None else self._reused
        self._measured = [record for record in measured if record]
        slots = [(i, part) for i in range(len(self._measured)) for part in TABLES]
        records = [self._measured[i][part] for i, part in slots]
        choices = [
            [Choice(bits, error) for bits, error in zip(r["bits"], r["errors"], strict=True)]
            for r in records
        ]
        budget = int(self._options.bpw * sum(record["weights"] for record in records))
        self._chosen = dict(zip(slots, allocate(choices, budget), strict=True))
        self._keep_measurement()

    def quantize_block(self, block: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The tensors of every linear of the block, which computes with them afterwards."""
        hessians = gather_hessians(block) if self.calibrated else {}
        made: Made = {}
        for part in TABLES:
            option = TABLES[part][self._choice(block, part)]
            self._check_weights(block, part)
            for site in quantised_sites(block, part):
                plans = {item.name: option[item.key] for item in linears(block, site)}
                made.update(self._site(block, plans, hessians.get(site.names)))
        return made

    def quantize_head(self, head: QuantizerBlock) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The output head, by ``head_bits``; 16 leaves it as it is."""
        if self._options.head_bits not in HEAD:
            return {}
        hessians = gather_hessians(head) if self.calibrated else {}
        names = head.sites[0].names
        plans = dict.fromkeys(names, HEAD[self._options.head_bits])
        return self._site(head, plans, hessians.get(names))

    def config(self) -> Mapping[str, Any]:
        """What exllamav2 writes, and readers look for."""
        return {
            "quant_method": "exl2",
            "version": PEER_VERSION,
            "bits": self._options.bpw,
            "head_bits": self._options.head_bits,
            "calibration": {},
        }

    def files(self) -> Mapping[str, str]:
        """The measurement, to be used again for other targets."""
        return {MEASUREMENT_FILE: self._measurement_text()}

    def summary(self) -> str:
        """One line for the model card."""
        how = (
            "rounded to nearest, layouts chosen by weight error"
            if self._options.method == "rtn"
            else "adaptive GPTQ, layouts chosen by measured output error"
        )
        return (
            f"EXL2, {self._options.bpw:g} bits per weight, head {self._options.head_bits} bits; "
            f"{how}."
        )

    def _is_head(self, block: QuantizerBlock) -> bool:
        return block.index >= block.num_blocks

    def _choice(self, block: QuantizerBlock, part: str) -> int:
        try:
            return self._chosen[block.index, part]
        except KeyError:
            raise ConfigError(
                f"The measurement has {len(self._measured)} blocks and the model "
                f"{block.num_blocks}: it is of another model."
            ) from None

    def _check_weights(self, block: QuantizerBlock, part: str) -> None:
        """A measurement of another model may have as many blocks."""
        found = sum(item.out_features * item.in_features for item in part_linears(block, part))
        measured = self._measured[block.index][part]["weights"]
        if found != measured:
            raise ConfigError(
                f"The measurement has {measured} weights in {block.name} ({part}) and the model "
                f"{found}: it is of another model. Give another --measurement."
            )

    def _site(
        self, block: QuantizerBlock, plans: Mapping[str, BitPlan], hessian: torch.Tensor | None
    ) -> Made:
        """Quantises the linears ``plans`` names, which read the same input."""
        weights = {name: block.weight(name) for name in plans}
        in_features = next(iter(weights.values())).shape[1]
        if not self.calibrated:
            seen = SiteInput.unknown(in_features)
        else:
            seen = SiteInput.of(torch.eye(in_features) if hessian is None else hessian)
        results = quantise_site(seen, [(weights[name], plan) for name, plan in plans.items()])
        made: Made = {}
        for name, quantised in zip(plans, results, strict=True):
            block.set_weight(name, in_place(quantised, seen, len(weights[name])))
            made[name] = quantised.tensors(seen.order)
            bias = block.tensor(f"{name}.bias")
            if bias is not None:
                made[name]["bias"] = padded_bias(bias)
        return made

    def _measurement_text(self) -> str:
        record = {"kind": KIND, "method": self._options.method, "blocks": self._measured}
        return json.dumps(record) + "\n"

    def _keep_measurement(self) -> None:
        if self._options.measurement is None or self._reused is not None:
            return
        path = Path(self._options.measurement)
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(self._measurement_text(), encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"--measurement {path} cannot be written: {error}.") from error


def padded_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias [N] as the files have it: float16, with zeros where the outputs are padded.

    Raises:
        CheckpointError: When float16 cannot hold it.
    """
    halved = F.pad(bias.half(), (0, padded(len(bias)) - len(bias)))
    if not bool(halved.isfinite().all()):
        raise CheckpointError(
            f"a bias has values up to {float(bias.abs().max()):g}; EXL2 stores biases as float16, "
            "which ends at 65504. Choose another --format."
        )
    return halved


def _read_measurement(options: Exl2Options) -> list[Mapping[str, Any]] | None:
    """What an earlier run measured, or None when there is nothing to use again.

    Raises:
        ConfigError: When the file is something else, or of the other kind of rounding.
    """
    path = options.measurement
    if path is None:
        return None
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--measurement {path}: there is no folder {Path(path).parent}.")
    if not Path(path).exists():
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        is_known, method = found["kind"] == KIND, found["method"]
        blocks = [_checked(record) for record in found["blocks"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--measurement {path} is no measurement of ours: {error}.") from None
    if not is_known or method != options.method:
        raise ConfigError(
            f"--measurement {path} was made with --method {method}, or by another version; "
            "measure again."
        )
    return blocks


def _checked(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for part, table in TABLES.items():
        if not len(record[part]["bits"]) == len(record[part]["errors"]) == len(table):
            raise ValueError(f"{part} has not {len(table)} options")
    return record
