"""Recognises EXL2 checkpoints by their tensors; old ones say nothing in ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ingle.plugin import CheckpointError, CheckpointInfo, Detection, WeightFormat
from ingle_quant_exl2.making.settings import Exl2Options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingle.plugin import Quantizer, WeightLoader

METHOD = "exl2"


class Exl2Format(WeightFormat):
    """EXL2: 2, 3, 4, 5, 6 and 8 bit groups mixed along the input features of one matrix."""

    name: ClassVar[str] = METHOD
    aliases: ClassVar[tuple[str, ...]] = ("exllamav2",)
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 1e-5,
        "float16": 1e-3,
        "bfloat16": 4e-3,
    }
    quantizer_options: ClassVar[type[Any] | None] = Exl2Options

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """Claims checkpoints with linears stored as ``.q_weight`` beside ``.q_groups``.

        A config that says ``exl2`` over tensors that are not is claimed below every other
        format, so that the user reads what is missing when nobody else reads the files.
        """
        count = sum(_is_linear(name, info) for name in info.tensor_shapes)
        named = _method(info) == METHOD
        if count:
            source = ", config.json says exl2" if named else ", config.json does not say so"
            return Detection(reason=f"{count} linears with .q_weight{source}", priority=10)
        if named and not any(name.endswith(".trellis") for name in info.tensor_shapes):
            return Detection(reason="config.json says exl2, but no .q_weight", priority=-50)
        return None

    def open(self, info: CheckpointInfo) -> WeightLoader:
        """A loader for this checkpoint; every header of every linear has been checked.

        Raises:
            CheckpointError: When there is no EXL2 linear, or one has missing tensors or wrong
                shapes or types.
        """
        from ingle_quant_exl2.loader import Exl2Loader, read_headers

        headers = read_headers(info)
        if not headers:
            raise CheckpointError(
                f"{info.path} holds no EXL2 linears: none of its {len(info.tensor_shapes)} tensors "
                "ends in .q_weight. Download every output*.safetensors, or choose another "
                "--quantization."
            )
        return Exl2Loader(headers)

    def make_quantizer(self, options: Any, source: CheckpointInfo) -> Quantizer:
        """Makes an EXL2 quant of a dense model.

        Raises:
            ConfigError: When ``options`` name a measurement that cannot be used.
        """
        from ingle_quant_exl2.making.quantizer import Exl2Quantizer

        return Exl2Quantizer(options)


def _is_linear(name: str, info: CheckpointInfo) -> bool:
    prefix, _, suffix = name.rpartition(".")
    beside = ("q_groups", "q_scale_max", "q_invperm")
    return suffix == "q_weight" and any(f"{prefix}.{leaf}" in info.tensor_shapes for leaf in beside)


def _method(info: CheckpointInfo) -> str:
    return str((info.quantization_config or {}).get("quant_method", "")).lower()
