"""Everything of a quant but its weights: configs, tokenizer, index, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingle.checkpoint.shards import INDEX_NAME
from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.quantizer import Quantizer
from ingle.quantize.tensor_file import write_text, writing

CARD: Final = "README.md"
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".part", ".index.json")
_OWN: Final = (
    "config.json",
    CARD,
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run has written.

    Attributes:
        out: The folder.
        index: Tensor name to file name.
        total_bytes: Bytes of all tensors.
        has_own_head: Whether the output head is quantised.
    """

    out: Path
    index: Mapping[str, str]
    total_bytes: int
    has_own_head: bool


def write_companions(
    info: CheckpointInfo, quantizer: Quantizer, written: Written, calibration: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes configs, index and copies; gives the ``quantization_config`` as written.

    ``config.json`` comes last: without it the folder is no model.
    """
    out = written.out
    for file in sorted(info.path.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in _OWN:
            with writing(out / file.name):
                shutil.copyfile(file, out / file.name)
    for name, text in quantizer.files().items():
        write_text(out / name, text)
    index = {"metadata": {"total_size": written.total_bytes}, "weight_map": dict(written.index)}
    write_text(out / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")
    quantization = _with_calibration(quantizer.config(), calibration)
    config = {**info.hf_config, "quantization_config": quantization}
    if written.has_own_head and config.get("tie_word_embeddings", True):
        config["tie_word_embeddings"] = False
    write_text(out / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return quantization


def _with_calibration(
    quantization: Mapping[str, Any], calibration: Mapping[str, Any]
) -> dict[str, Any]:
    """Under ``calibration`` where the format has that key, else under ``meta``."""
    if "calibration" in quantization:
        return {**quantization, "calibration": {**quantization["calibration"], **calibration}}
    meta = {**quantization.get("meta", {}), "calibration": dict(calibration)}
    return {**quantization, "meta": meta}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the model card says.

    Attributes:
        source: The model as it was named.
        format: The format's name.
        bits_per_weight: Of the layers' linears.
        head_bits_per_weight: Of the output head.
        total_bytes: Bytes of all tensors.
        summary: What was done, in a line.
        calibration: Rows, length, source.
        options: The command's flags.
        quality: Lines about measured quality.
    """

    source: str
    format: str
    bits_per_weight: float
    head_bits_per_weight: float
    total_bytes: int
    summary: str
    calibration: Mapping[str, Any]
    options: Mapping[str, Any]
    quality: tuple[str, ...]

    def text(self) -> str:
        """The card as Markdown, with the head that hubs read."""
        name = Path(self.source).name or self.source
        lines = [
            "---",
            "library_name: ingle",
            f"base_model: {self.source}",
            "base_model_relation: quantized",
            f"tags: [quantized, {self.format}]",
            "---",
            "",
            f"# {name}, {self.format}",
            "",
            self.summary,
            "",
            "| | |",
            "|---|---|",
            f"| bits per weight | {self.bits_per_weight:.3f} (layers), "
            f"{self.head_bits_per_weight:.3f} (output head) |",
            f"| size | {self.total_bytes / 1e6:.1f} MB ({self.total_bytes} bytes of tensors) |",
            f"| calibration | {self._calibration()} |",
            *(f"| {line} |" for line in self.quality),
            f"| options | {self._options()} |",
            "",
            f"Made with `ingle quantize --format {self.format}`; serve it with `ingle serve`.",
        ]
        return "\n".join(lines) + "\n"

    def _calibration(self) -> str:
        facts = self.calibration
        if facts["source"] == "none":
            return "none"
        origin = (
            "text the model wrote itself"
            if facts["source"] == "self"
            else f"`{Path(facts['source']).name}`"
        )
        return f"{facts['rows']} rows of {facts['length']} tokens, {origin}, seed {facts['seed']}"

    def _options(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.options.items()) or "defaults"
