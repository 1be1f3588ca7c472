"""What one affine linear is as the headers describe it, and whether its tensors can be that.

No torch here: headers are read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ingle.errors import CheckpointError
from ingle.plugin.checkpoint import CheckpointInfo

if TYPE_CHECKING:
    from ingle.plugin.affine import AffineWeight

INT32: Final = ("I32",)
_WORDS: Final = ("I8", "I16", "I32", "I64")
FLOATS: Final = ("F16", "BF16", "F32", "F64")
_ROLE_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "qweight": _WORDS,
    "qzeros": _WORDS,
    "B": INT32,
    "g_idx": ("I32", "I64"),
    **dict.fromkeys(("scales", "s", "zeros", "scaled_zeros"), FLOATS),
}
"""safetensors types of a role's tensor; a plugin's own roles are its own affair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """One linear as the headers describe it.

    Attributes:
        name: Checkpoint name without the tensor suffix.
        layout: The plugin's own name for how it is stored.
        bits: b.
        out_features: N as stored.
        in_features: K; where the headers leave it open, the roundest number that fits.
        spare_inputs: How many inputs fewer would fill the same words, where it is left open.
        extra_inputs: How many more would.
        tensors: Checkpoint tensor names by role (``"qweight"``, ``"scales"`` …).
    """

    name: str
    layout: str
    bits: int
    out_features: int
    in_features: int
    tensors: Mapping[str, str]
    spare_inputs: int = 0
    extra_inputs: int = 0


def check_types(
    info: CheckpointInfo, linear: StoredLinear, wanted: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises ``CheckpointError`` for a tensor of the linear that is empty or of a type that its
    layout does not have (``wanted``, by role): its bytes would be read as something else."""
    for role, tensor in linear.tensors.items():
        types = wanted.get(role) or _ROLE_TYPES.get(role)
        found = info.tensor_dtypes[tensor]
        if types and found not in types:
            raise CheckpointError(f"tensor {tensor}: expected {' or '.join(types)}, found {found}")
        if 0 in info.tensor_shapes[tensor]:
            raise CheckpointError(
                f"tensor {tensor} is empty (shape {list(info.tensor_shapes[tensor])}); "
                "the file is damaged"
            )


def check_finite(linear: StoredLinear, weight: AffineWeight) -> None:
    """Raises ``CheckpointError`` for scales, or zeros stored as products, that are no numbers."""
    floats = {"scales": weight.scales, "zeros": weight.offsets}
    for kind, values in floats.items():
        if values is not None and not bool(values.isfinite().all()):
            roles = [r for r in linear.tensors if kind in r] or ["s"]
            raise CheckpointError(
                f"tensor {linear.tensors[roles[0]]} has values that are not finite numbers; "
                "the file is damaged"
            )
