"""``quantize``: from a model and options to a folder that the ecosystem reads."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingle.checkpoint.hub import resolve_model
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.engine.device import choose_device
from ingle.errors import CapacityError, CheckpointError, ConfigError
from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.linear import WeightFormat
from ingle.quantize.block import HEAD
from ingle.quantize.calibration import (
    SELF_WRITTEN,
    Calibration,
    cached_rows,
    cut_documents,
    keep_rows,
    rows_of_texts,
)
from ingle.quantize.config import CalibrationConfig, QuantizeConfig
from ingle.quantize.output_folder import CARD, Card, Written, write_companions
from ingle.quantize.progress import MEASURE, QUANTIZE, Progress, fingerprint
from ingle.quantize.run import QuantizeRun, Source
from ingle.quantize.stored_bits import stored_bits
from ingle.quantize.tensor_file import write_text
from ingle.registry.choose import find_by_name, quant_method
from ingle.registry.loader import load_plugins

KL_TOKENS = 2048
"""Tokens over which the card's divergence is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A finished quant.

    Attributes:
        path: The folder.
        format: The format's name.
        bits_per_weight: Of the layers' linears, everything the format keeps for them included.
        total_bytes: Bytes of all tensors.
        kl: Mean KL divergence from the original, in nats a token; None when not measured.
        seconds: What the run took, of this process.
        peak_memory_bytes: Most memory this process held.
        peak_device_bytes: Most memory held on the card; 0 on a CPU.
    """

    path: Path
    format: str
    bits_per_weight: float
    total_bytes: int
    kl: float | None
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int


def find_format(name: str, disable_plugin: Sequence[str] = ()) -> WeightFormat:
    """The weight format ``name`` that can be made.

    Raises:
        ConfigError: When none is named, or this one is only read.
        PluginError: When no plugin offers it.
    """
    registry = load_plugins(disable_plugin)
    offers = registry.weight_formats()
    makers = sorted(o.item.name for o in offers if o.item.quantizer_options is not None)
    if not name:
        raise ConfigError(f"--format is missing; give one of {', '.join(makers)}.")
    found = find_by_name(registry, offers, name, "--format").item
    if found.quantizer_options is None:
        raise ConfigError(
            f"--format {name}: it is read, but not made. Give one of {', '.join(makers)}."
        )
    return found


def quantize(model: str, out: str | Path, **options: Any) -> Quantized:
    """Makes a quant of ``model`` in the new folder ``out``; a run that was killed goes on.

    Example:
        >>> quantize("my-model", "my-quant", format="NAME", bits=4, group_size=128)

    Args:
        model: A dense model: a folder or a hub id.
        out: The folder to write.
        **options: Fields of ``QuantizeConfig``, of ``CalibrationConfig`` and of the format's own
            options.

    Raises:
        ConfigError: An option cannot work, or ``out`` holds something else.
        CheckpointError, PluginError, CapacityError: The model cannot be used.
    """
    config = QuantizeConfig(**_take(QuantizeConfig, options))
    calibration = CalibrationConfig(**_take(CalibrationConfig, options))
    form = find_format(config.format, config.disable_plugin)
    assert form.quantizer_options is not None
    mine = form.quantizer_options(**_take(form.quantizer_options, options))
    known = [CalibrationConfig, QuantizeConfig, form.quantizer_options]
    if options:
        names = sorted(f.name for cls in known for f in dataclasses.fields(cls))
        raise ConfigError(f"quantize has no option {', '.join(options)}; it takes {names}.")
    return make_quant(model, Path(out), config, calibration, mine)


def _take(cls: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls) if f.name in options]
    return {name: options.pop(name) for name in names}


def make_quant(
    model: str, out: Path, config: QuantizeConfig, calibration: CalibrationConfig, options: Any
) -> Quantized:
    """The same with options as objects; ``options`` is the format's."""
    began = time.monotonic()
    form = find_format(config.format, config.disable_plugin)
    path = resolve_model(model, config.revision)
    if out.resolve() == path.resolve():
        raise ConfigError(f"OUT is the model's own folder, {out}; give a new folder.")
    with open_checkpoint(path) as checkpoint, torch.inference_mode():
        info = checkpoint.info()
        if info.quantization_config:
            raise ConfigError(
                f"{model} is quantised already ({quant_method(info) or 'quantization_config'}). "
                "Quantise the original, or write this one out first: ingle dequantize."
            )
        source = Source(
            checkpoint=checkpoint,
            info=info,
            config=load_model_config(path, info),
            device=choose_device(config.device),
        )
        quantizer = form.make_quantizer(options, info)
        mark = fingerprint(path, info.tensor_shapes)
        rows = _rows(source, calibration, mark, config) if quantizer.calibrated else None
        asked = dataclasses.asdict(options)
        run = QuantizeRun(
            source=source,
            quantizer=quantizer,
            calibration=rows,
            out=out,
            progress=Progress.open(
                out,
                MEASURE if quantizer.measures else QUANTIZE,
                {
                    "model": mark,
                    "format": form.name,
                    "options": {k: str(v) for k, v in asked.items()},
                    "calibration": None if rows is None else rows.digest,
                },
            ),
        )
        run.run()
        facts = {**run.facts(), "seed": calibration.seed}
        _finish(run, facts)
    made = _report(model, form, out, config, (facts, quantizer.summary(), asked, began))
    # Last of all: a run that is killed while it measures goes on from there.
    run.progress.finish()
    return made


def _rows(
    source: Source, config: CalibrationConfig, mark: str, settings: QuantizeConfig
) -> Calibration:
    if config.calibration is not None:
        return rows_of_texts(config, load_tokenizer(source.info.path))
    shape = f"{config.calibration_rows}x{config.calibration_length}-{config.seed}"
    file = default_cache_folder() / "calibration" / f"{mark}-{shape}.json"
    found = cached_rows(config, file)
    if found is not None:
        return found
    from ingle.quantize.self_written import write_documents

    with torch.inference_mode(False):
        documents = write_documents(source.info.path, source.config, config, settings.device)
    rows = cut_documents(documents, config)
    keep_rows(rows, file)
    return Calibration(rows=rows, source=SELF_WRITTEN)


def _finish(run: QuantizeRun, facts: Mapping[str, Any]) -> None:
    progress = run.progress
    written = Written(
        out=run.out,
        index=progress.index,
        total_bytes=sum(progress.sizes.values()),
        has_own_head=any(
            name.startswith(f"{HEAD}.") and not name.endswith((".weight", ".bias"))
            for name in progress.index
        ),
    )
    write_companions(run.source.info, run.quantizer, written, facts)


def _report(
    model: str,
    form: WeightFormat,
    out: Path,
    config: QuantizeConfig,
    about: tuple[Mapping[str, Any], str, Mapping[str, Any], float],
) -> Quantized:
    """Measures, writes the card, and says what was made."""
    facts, summary, options, began = about
    bits = stored_bits(out, form.name)
    kl, quality = _quality(model, out, config) if config.measure_kl else (None, ())
    card = Card(
        source=model,
        format=form.name,
        bits_per_weight=bits.bits_per_weight,
        head_bits_per_weight=bits.head_bits_per_weight,
        total_bytes=bits.total_bytes,
        summary=summary,
        calibration=facts,
        options={k: v for k, v in options.items() if v is not None},
        quality=quality,
    )
    write_text(out / CARD, card.text())
    on_card = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return Quantized(
        path=out,
        format=form.name,
        bits_per_weight=bits.bits_per_weight,
        total_bytes=bits.total_bytes,
        kl=kl,
        seconds=time.monotonic() - began,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        peak_device_bytes=on_card,
    )


def _quality(model: str, out: Path, config: QuantizeConfig) -> tuple[float | None, tuple[str, ...]]:
    """The divergence, and the card's lines about it."""
    from ingle.quantize.evaluation import evaluate

    try:
        found = evaluate([str(out)], reference=model, max_tokens=KL_TOKENS, device=config.device)[0]
    except (CapacityError, CheckpointError) as error:
        print(f"ingle: KL was not measured: {error}", file=sys.stderr)
        return None, ("KL | not measured",)
    low, high = found.kl_interval
    return found.kl, (
        f"KL from the original | {found.kl:.4f} nats a token ({low:.4f} to {high:.4f}), "
        f"over {found.num_tokens} tokens of {found.text}",
        f"same likeliest token | {found.top1:.1%}",
        f"perplexity there | {found.perplexity:.3f} (original {found.reference_perplexity:.3f})",
    )
