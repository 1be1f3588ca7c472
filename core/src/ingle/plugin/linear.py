"""The contract for weight formats and matmul kernels.

Shape letters used here and by every format:
    N  output features      K  input features      R  rows of activations (tokens)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ingle.errors import ConfigError
from ingle.plugin.checkpoint import CheckpointInfo, Detection, Support, TensorReader

if TYPE_CHECKING:
    import torch

    from ingle.plugin.compiled_function import CompiledFunction
    from ingle.plugin.device import DeviceInfo
    from ingle.plugin.quantizer import Quantizer


COUNTER_BYTES = 1 << 16
"""The part of a workspace, from its start, that is zero between calls: room for counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of a linear this rank holds, in logical features.

    ``axis`` is ``"in"``, ``"out"`` or None (the whole); the rank holds ``start:stop`` of ``size``.
    """

    axis: Literal["in", "out"] | None = None
    start: int = 0
    stop: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """The linear that core wants.

    Attributes:
        name: Checkpoint name without the tensor suffix: ``model.layers.0.self_attn.q_proj``.
            Core has already made sure that the checkpoint stores tensors under it.
        in_features: K, before sharding.
        out_features: N, logical, before sharding. What is stored may be padded to more.
        dtype: torch dtype of the activations.
        device: Where the weight will live.
        shard: The part wanted; ``Shard()`` is the whole.
        expert: Index of the expert for stacked expert tensors, else None.
    """

    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: DeviceInfo
    shard: Shard = Shard()
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """One use core has for a kernel; it asks once per row range.

    Attributes:
        device: The device it will run on.
        dtype: torch dtype of the activations.
        rows: Row counts it will be called with, as a range: ``range(1, 17)`` is 1 to 16 rows.
    """

    device: DeviceInfo
    dtype: torch.dtype
    rows: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What core wants done to a product before it is stored. Epilogues are core's own.

    Attributes:
        kind: ``"add"``: ``out = x @ W.T + residual``. A kernel that lists the kind in
            ``MatmulKernel.epilogues`` does it; otherwise core does it after the call.
        residual: [R, N], activation dtype.
    """

    kind: Literal["add"]
    residual: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonDecode:
    """A ``@triton.jit`` function that decodes one tile of a weight inside core's own matmul.

    Attributes:
        fn: ``decode(T, n, k, N, K, META, DTYPE) -> [BN, BK]``; T is a tuple of pointers to
            ``tensors``, n [BN] and k [BK] int32 index vectors, the rest constexpr. Indices are
            always inside the weight: at an edge the last one repeats.
        tensors: What T points to, lookup tables included.
        sections: ``(k0, k1, META)``: one launch each; META is a tuple of ints.
        tile: ``(n_multiple, k_multiple)`` a tile must be aligned to.
    """

    fn: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    sections: tuple[tuple[int, int, tuple[int, ...]], ...]
    tile: tuple[int, int]


RowFunction = Callable[["Sequence[torch.Tensor]", "torch.Tensor"], "torch.Tensor"]
"""``function(tensors, x)``: float32 [K], in kernel order, to float32 [stored N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProduct:
    """One row times a weight, in torch operators that torch's compiler makes one loop of.

    On a CPU core compiles a whole decode step of a layer ahead of time, this product in it.

    Attributes:
        function: A function of a module (no lambda, no method): the compiler runs in a process of
            its own and imports it by name. Shapes and dtypes are constants to it.
        shapes: Shape and dtype of each of the tensors.
        tensors: Gives the tensors the function reads. Called once, when the result is there.
        copied_bytes: Bytes that stay in memory beside the weight's own.
        adopt: The same as ``tensors``, but writes them over the weight's own memory where they are
            the same numbers in another order. Called when compiled steps begin, while no step
            runs; the weight serves as before afterwards. None: ``tensors`` copies nothing of size.
    """

    function: RowFunction
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    tensors: Callable[[], Sequence[torch.Tensor]]
    copied_bytes: int = 0
    adopt: Callable[[], Sequence[torch.Tensor]] | None = None

    @classmethod
    def over(cls, function: RowFunction, *tensors: torch.Tensor) -> Self:
        """A product that reads the weight's own tensors as they are."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        return cls(function=function, shapes=shapes, tensors=lambda: tensors)


class LinearWeight(ABC):
    """One linear's weight in whatever form its format keeps it. It owns its bytes.

    Attributes:
        in_features: K.
        out_features: N, logical: what core wants.
        stored_out_features: N as stored, with padding. ``dequantize`` and kernels work on the
            stored N; cutting to ``out_features`` is core's.
        input_order: int64 [K] or None. ``x[:, input_order]`` is what kernels expect; core gathers
            once per distinct order. ``dequantize`` is in the *original* input order.
        input_scale: [K] or None; core multiplies the input by it before the gather.
    """

    in_features: int
    out_features: int
    stored_out_features: int
    input_order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """The weight as [stored N, K], plain PyTorch, on the device its tensors are on.

        It is the fallback and the oracle, so it includes ``input_scale`` and undoes
        ``input_order``: ``x @ dequantize().T`` is the linear.
        """

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor this weight owns, by a name of its own choosing; used to move and count."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy of this weight that holds ``tensors`` (same names) instead of its own.

        Works on a weight as loaded and as prepared: core moves weights with it, and restores one
        that a faulty kernel has ruined."""

    def row_product(self) -> RowProduct | None:
        """How a compiled decode step on a CPU multiplies with this weight, as prepared; None:
        layers that hold one stay uncompiled."""
        return None

    @property
    def triton(self) -> TritonDecode | None:
        """How core's Triton skeleton decodes this weight, or None."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors it owns."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class WeightLoader(ABC):
    """Reads the linears of one checkpoint. Built by ``WeightFormat.open``."""

    @abstractmethod
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Every linear it stores, from headers alone: name -> (out_features, in_features)."""

    @abstractmethod
    def tensor_names(self, name: str) -> tuple[str, ...]:
        """The checkpoint tensors that linear ``name`` is made of (bias not included)."""

    @abstractmethod
    def packed_bytes(self, name: str) -> int:
        """Bytes linear ``name`` takes on disk, from headers alone."""

    def row_product_bytes(self, name: str) -> int | None:
        """About what the ``RowProduct`` of linear ``name`` copies, the linear being loaded for
        bfloat16 and prepared for a CPU; None when it will have none. As far as headers tell:
        memory plans count by it."""
        return None

    def can_shard(self, spec: LinearSpec) -> Support:
        """Whether ``load_linear`` honours ``spec.shard``. No: core loads it whole."""
        return Support(ok=spec.shard.axis is None, reason="this format does not shard")

    @abstractmethod
    def load_linear(self, spec: LinearSpec, reader: TensorReader) -> LinearWeight:
        """Reads one linear. Raises ``CheckpointError`` naming tensor, wanted and found shape."""

    def fuse(self, parts: Sequence[LinearWeight]) -> LinearWeight | None:
        """One weight that computes all parts side by side along N, or None: run them apart."""
        return None


class WeightFormat(ABC):
    """Recognises a weight format. Stateless.

    Attributes:
        name: The name users type after ``--quantization``.
        aliases: Other spellings accepted there.
        max_relative_error: Largest error a kernel of this format may show against
            ``x @ dequantize().T``, by dtype name (``"bfloat16"``), as relative Frobenius norm.
            The conformance kit caps it at twice torch's own error in that dtype.
        quantizer_options: A frozen dataclass of options for making quants of this format, or None:
            it only reads them. Each field is a flag of ``ingle quantize``, documented under
            ``Attributes:``; it raises ``ConfigError`` where values cannot work.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 1e-5,
        "float16": 2e-3,
        "bfloat16": 5e-3,
    }
    quantizer_options: ClassVar[type[Any] | None] = None

    @abstractmethod
    def detect(self, info: CheckpointInfo) -> Detection | None:
        """A claim on this checkpoint, or None. Must decline every other format's files."""

    @abstractmethod
    def open(self, info: CheckpointInfo) -> WeightLoader:
        """A loader for this checkpoint. Checks bits, groups and versions once, before gigabytes
        are read; raises ``CheckpointError`` when the checkpoint cannot be read."""

    def make_quantizer(self, options: Any, source: CheckpointInfo) -> Quantizer:
        """Makes a quant of the dense checkpoint ``source``; ``options`` is a
        ``quantizer_options``. Raises ``ConfigError`` when they do not fit the model."""
        raise ConfigError(f"{self.name} quants can be read, but not made.")


class MatmulKernel(ABC):
    """Multiplies activations with weights of one kind on one kind of device.

    Attributes:
        name: Unique; shown in reports as the kernel that serves N linears.
        priority: The highest among those that support a use wins.
        epilogues: Kinds of ``Epilogue`` that ``matmul`` carries out itself.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    epilogues: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Whether it can serve this use, with a reason either way."""

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Repacks a weight once after loading. Consumes it; the result still dequantises, and
        one layout serves every row range. A weight that is prepared already is returned as is."""
        return weight

    def functions(self, weight: LinearWeight) -> Sequence[CompiledFunction]:
        """Functions it calls for a prepared weight, for core to compile ahead of time (on a CPU);
        it calls them from the thread that runs steps, which goes on while core compiles."""
        return ()

    def tune(self, weight: LinearWeight, dtype: torch.dtype) -> str:
        """Measures on this device how a prepared weight is launched best, and keeps it on disk for
        later starts (``ingle.plugin.launches``). Called by ``ingle compile``, never while an engine
        starts or serves; for a card that is absent, to compile what would be measured there.

        Args:
            weight: As ``prepare`` gave it.
            dtype: Of the activations it meets.

        Returns:
            What was found, in a line; empty where there is nothing to choose.
        """
        return ""

    def workspace_bytes(self, weight: LinearWeight, max_rows: int) -> int:
        """Scratch it needs for up to ``max_rows`` rows.

        All kernels of a model share it. Its first ``COUNTER_BYTES`` are zero before every call, and
        a kernel leaves them so; what follows holds whatever the last kernel left there."""
        return 0

    @abstractmethod
    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` (already in ``input_order``) times the weight: [R, stored N].

        ``x`` is never written. ``out``, when given, is where the result goes and is returned.
        Deterministic: the same input gives the same bits.
        """
