"""Reads the EXL2 linears of one checkpoint. Headers need no torch; reading a weight does.

Letters: N output features as stored, K input features, G groups, W words of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ingle.plugin import (
    CheckpointError,
    CheckpointInfo,
    LinearSpec,
    Support,
    TensorReader,
    WeightLoader,
)
from ingle.plugin.checkpoint import refuse_packed_embeddings
from ingle_quant_exl2.layout import ROW_UNIT, parse_layout

if TYPE_CHECKING:
    import torch

    from ingle_quant_exl2.weight import StoredExl2Weight

REQUIRED: Final[Mapping[str, str]] = {
    "q_weight": "I32",
    "q_scale": "I32",
    "q_scale_max": "F16",
    "q_groups": "I16",
    "q_invperm": "I32",
}
"""The tensors of a linear and their safetensors types."""
IGNORED: Final = ("q_perm", "q_group_map")
"""Follow from the others; old files may hold them."""
BYTES: Final[Mapping[str, int]] = {"I64": 8, "I32": 4, "I16": 2, "F16": 2}
MAX_IN_FEATURES: Final = 65536
"""Producers keep the permutation in 16 bits."""
MAX_PADDING: Final = 128
"""Outputs are padded to a multiple of 32; other producers may pad to as much as 128."""
SCALES_PER_WORD: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One linear as the headers describe it.

    Attributes:
        name: Checkpoint name without suffix.
        out_features: N.
        in_features: K.
        num_words: W.
        tensor_names: Every tensor it is made of.
        num_bytes: Bytes they take on disk.
    """

    name: str
    out_features: int
    in_features: int
    num_words: int
    tensor_names: tuple[str, ...]
    num_bytes: int


def read_headers(info: CheckpointInfo) -> dict[str, Header]:
    """Every EXL2 linear of the checkpoint, by name.

    Raises:
        CheckpointError: Naming the tensor that is missing or has a wrong shape or type.
    """
    suffix = ".q_weight"
    names = [key.removesuffix(suffix) for key in info.tensor_shapes if key.endswith(suffix)]
    refuse_packed_embeddings({name: (f"{name}{suffix}",) for name in names})
    return {name: _read_header(name, info) for name in names}


def _read_header(name: str, info: CheckpointInfo) -> Header:
    for suffix, dtype in REQUIRED.items():
        _check_dtype(f"{name}.{suffix}", dtype, info)
    shapes = {suffix: info.tensor_shapes[f"{name}.{suffix}"] for suffix in REQUIRED}
    _check_shapes(name, shapes)
    num_words, out_features = shapes["q_weight"]
    tensor_names = tuple(
        f"{name}.{suffix}"
        for suffix in (*REQUIRED, *IGNORED)
        if f"{name}.{suffix}" in info.tensor_shapes
    )
    return Header(
        name=name,
        out_features=out_features,
        in_features=shapes["q_invperm"][0],
        num_words=num_words,
        tensor_names=tensor_names,
        num_bytes=sum(_stored_bytes(tensor, info) for tensor in tensor_names),
    )


def _stored_bytes(tensor: str, info: CheckpointInfo) -> int:
    return math.prod(info.tensor_shapes[tensor]) * BYTES[info.tensor_dtypes[tensor]]


def _check_dtype(tensor: str, wanted: str, info: CheckpointInfo) -> None:
    if tensor not in info.tensor_shapes:
        raise CheckpointError(
            f"{tensor} is missing: an EXL2 linear needs {', '.join(REQUIRED)}. A shard may be "
            "missing too; download every output*.safetensors."
        )
    found = info.tensor_dtypes.get(tensor, "")
    if found != wanted:
        raise CheckpointError(f"{tensor} has type {found}, EXL2 wants {wanted}.")


def _check_shapes(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    ranks = {"q_weight": 2, "q_scale": 2, "q_scale_max": 1, "q_groups": 1, "q_invperm": 1}
    for suffix, rank in ranks.items():
        if len(shapes[suffix]) != rank:
            raise CheckpointError(
                f"{name}.{suffix} has shape {list(shapes[suffix])}, EXL2 wants {rank} dimensions."
            )
    outputs = shapes["q_weight"][1]
    inputs = shapes["q_invperm"][0]
    groups = shapes["q_scale_max"][0]
    if outputs == 0 or outputs % SCALES_PER_WORD:
        raise CheckpointError(
            f"{name}.q_weight has {outputs} columns; EXL2 wants a multiple of {SCALES_PER_WORD}."
        )
    if inputs == 0 or inputs % ROW_UNIT or inputs > MAX_IN_FEATURES:
        raise CheckpointError(
            f"{name}.q_invperm has {inputs} entries; EXL2 wants a multiple of {ROW_UNIT}, "
            f"at most {MAX_IN_FEATURES}."
        )
    wanted = {"q_scale": (groups, outputs // SCALES_PER_WORD), "q_groups": (2 * groups,)}
    for suffix, shape in wanted.items():
        if shapes[suffix] != shape:
            raise CheckpointError(
                f"{name}.{suffix} has shape {list(shapes[suffix])}, but {groups} groups and "
                f"{outputs} outputs want {list(shape)}."
            )


class Exl2Loader(WeightLoader):
    """Loads linears by name; every header has been checked when it is built."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self._headers = headers

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Every EXL2 linear: name -> (N with padding, K)."""
        return {name: (h.out_features, h.in_features) for name, h in self._headers.items()}

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """Its five tensors, and ``q_perm`` where an old file has one."""
        return self._header(name).tensor_names

    def packed_bytes(self, name: str) -> int:
        """Bytes of its tensors."""
        return self._header(name).num_bytes

    def can_shard(self, spec: LinearSpec) -> Support:
        """Outputs can be cut where a word of scale codes starts; inputs cannot: the permutation
        mixes them."""
        shard = spec.shard
        if shard.axis is None:
            return Support(ok=True, reason="whole")
        if shard.axis == "in":
            return Support(ok=False, reason="EXL2 permutes input features over the whole matrix")
        ends = shard.stop % SCALES_PER_WORD == 0 or shard.stop == shard.size
        if shard.start % SCALES_PER_WORD or not ends:
            return Support(
                ok=False,
                reason=f"outputs {shard.start}:{shard.stop} do not fall on multiples of "
                f"{SCALES_PER_WORD}, one word of scale codes",
            )
        return Support(ok=True, reason="outputs cut on whole words of scale codes")

    def load_linear(self, spec: LinearSpec, reader: TensorReader) -> StoredExl2Weight:
        """Reads the linear ``spec.name``, or the part of its outputs that ``spec.shard`` names.

        Raises:
            CheckpointError: When shapes do not fit ``spec`` or the data breaks the format.
        """
        from ingle_quant_exl2.weight import StoredExl2Weight

        header = self._header(spec.name)
        _check_features(header, spec)
        start, stop = self._columns(header, spec)
        name = spec.name
        q_groups = reader.get(f"{name}.q_groups").tolist()
        layout = parse_layout(name, q_groups, header.num_words, header.in_features)
        scale_max = reader.get(f"{name}.q_scale_max")
        if not bool(scale_max.isfinite().all()):
            raise CheckpointError(f"{name}.q_scale_max has values that are not finite numbers.")
        order = _input_order(name, reader.get(f"{name}.q_invperm"))
        logical = spec.shard.stop - spec.shard.start if spec.shard.axis else spec.out_features
        device = spec.device.torch_device
        return StoredExl2Weight(
            in_features=header.in_features,
            out_features=logical,
            stored_out_features=stop - start,
            dtype=spec.dtype,
            layout=layout,
            q_scale=_read_columns(reader, f"{name}.q_scale", start // 8, stop // 8).to(device),
            q_scale_max=scale_max.to(device),
            input_order=None if order is None else order.to(device),
            q_weight=_read_columns(reader, f"{name}.q_weight", start, stop).to(device),
        )

    def _columns(self, header: Header, spec: LinearSpec) -> tuple[int, int]:
        """Stored outputs to read. A last shard ends on a whole word of scale codes."""
        if spec.shard.axis is None:
            return 0, header.out_features
        support = self.can_shard(spec)
        if not support:
            raise CheckpointError(f"{spec.name} cannot be sharded: {support.reason}.")
        stop = -(-spec.shard.stop // SCALES_PER_WORD) * SCALES_PER_WORD
        return spec.shard.start, stop

    def _header(self, name: str) -> Header:
        try:
            return self._headers[name]
        except KeyError:
            raise CheckpointError(f"{name} is not an EXL2 linear of this checkpoint.") from None


def _check_features(header: Header, spec: LinearSpec) -> None:
    if header.in_features != spec.in_features:
        raise CheckpointError(
            f"{header.name}.q_invperm has {header.in_features} entries, the model wants "
            f"{spec.in_features} input features."
        )
    padding = header.out_features - spec.out_features
    if not 0 <= padding < MAX_PADDING:
        raise CheckpointError(
            f"{header.name}.q_weight has {header.out_features} columns, the model wants "
            f"{spec.out_features} output features and at most {MAX_PADDING - 1} of padding."
        )


def _read_columns(reader: TensorReader, tensor: str, start: int, stop: int) -> torch.Tensor:
    return reader.get_slice(tensor, 1, start, stop).contiguous()


def _input_order(name: str, q_invperm: torch.Tensor) -> torch.Tensor | None:
    """Input feature of each quantised row, int64 [K]; None for the identity.

    Raises:
        CheckpointError: When ``q_invperm`` is not a permutation.
    """
    import torch

    order = torch.argsort(q_invperm)
    rows = torch.arange(len(order), dtype=q_invperm.dtype)
    if not torch.equal(q_invperm[order], rows):
        raise CheckpointError(f"{name}.q_invperm is not a permutation of its {len(order)} rows.")
    return None if torch.equal(q_invperm, rows) else order
