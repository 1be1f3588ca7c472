"""What a layer does beside its products and attention, for several rows in bfloat16 on a CPU.

Torch's operators go over a prompt's activations once each, four to seven times for a norm, and
cost some microseconds each when rows are few. Each of these functions, compiled, goes over them
once. They round where the operators round: what is computed in float32 and what in bfloat16 is
that of ``layers``, ``feed_forward`` and ``rotary``.

Letters: R rows, E hidden size, I intermediate size, A heads of the joined projection, H of them
that turn, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ingle.plugin.compiled_function import Compilable, CompiledFunction

HALF = torch.bfloat16
ONE_STEP = 2.0**-7
"""At most what lies between a bfloat16 and the next, relative to it."""


def normed(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, out: torch.Tensor) -> None:
    """The RMS norm of ``x`` [R, E] over E, rounded to bfloat16, times ``weight`` bfloat16 [E];
    ``eps`` float32 [1]."""
    out.copy_(_divided(x, eps).to(HALF) * weight)


def full_normed(
    x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, out: torch.Tensor
) -> None:
    """The RMS norm of ``x`` [R, E] over E, times ``weight`` float32 [E], and only then rounded."""
    out.copy_((_divided(x, eps) * weight).to(HALF))


def _divided(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    full = x.float()
    return full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)


def gated(
    activation: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor, out: torch.Tensor
) -> None:
    """``activation`` of the first [R, I] of ``both`` [R, 2, I], times the second."""
    out.copy_(activation(both[:, 0]) * both[:, 1])


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """The first H of ``heads`` [R, A, 2, D/2], turned as ``rotate`` does, into ``out``
    [R, H, 2, D/2]; cosines and signed sines [R, 2, D/2]."""
    x = heads[:, : out.shape[1]]
    kept = (x * cos.unsqueeze(1)).float()
    out.copy_((kept + x.flip(2).float() * sin.unsqueeze(1).float()).to(HALF))


def _normed(name: str, function: Callable[..., None], weight: torch.dtype) -> Compilable:
    return Compilable(
        name=f"{__name__}:{name}",
        function=function,
        arguments=(
            (("rows", "hidden"), HALF),
            (("hidden",), weight),
            ((1,), torch.float32),
            (("rows", "hidden"), HALF),
        ),
        usual={"rows": 512, "hidden": 1024},
        max_relative_error=ONE_STEP,  # sums in another order
    )


NORMED = _normed("NORMED", normed, HALF)
FULL_NORMED = _normed("FULL_NORMED", full_normed, torch.float32)


def _gated(name: str, activation: Callable[[torch.Tensor], torch.Tensor]) -> Compilable:
    return Compilable(
        name=f"{__name__}:{name}",
        function=partial(gated, activation),
        arguments=((("rows", 2, "inner"), HALF), (("rows", "inner"), HALF)),
        usual={"rows": 512, "inner": 2048},
        max_relative_error=2 * ONE_STEP,  # exponentials of another library, rounded twice
    )


GATED_SILU = _gated("GATED_SILU", torch.nn.functional.silu)
GATED_GELU_TANH = _gated("GATED_GELU_TANH", partial(torch.nn.functional.gelu, approximate="tanh"))

TURNED = Compilable(
    name=f"{__name__}:TURNED",
    function=turned,
    arguments=(
        (("rows", "heads", 2, "half"), HALF),
        (("rows", 2, "half"), HALF),
        (("rows", 2, "half"), HALF),
        (("rows", "turning", 2, "half"), HALF),
    ),
    usual={"rows": 512, "heads": 16, "turning": 12, "half": 32},
)


class PromptNorm:
    """``normed``, or ``full_normed`` for weights in float32, once it is compiled.

    Args:
        weight: [E], in bfloat16 or float32.
        eps: Added to the mean square.

    Attributes:
        function: What core may compile.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.function = CompiledFunction(NORMED if weight.dtype is HALF else FULL_NORMED)
        self._weight = weight
        self._eps = torch.tensor([eps])

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """``x`` bfloat16 [R, E], normed; None where operators have to do it."""
        if not self.function.is_compiled or x.dim() != 2 or not x.is_contiguous():
            return None
        out = torch.empty_like(x)
        self.function(x, self._weight, self._eps, out)
        return out


class PromptGate:
    """``gated``, once it is compiled.

    Args:
        source: For the model's activation.

    Attributes:
        function: What core may compile.
    """

    def __init__(self, source: Compilable) -> None:
        self.function = CompiledFunction(source)

    def __call__(self, both: torch.Tensor) -> torch.Tensor | None:
        """``both`` bfloat16 [R, 2 * I] to [R, I]; None where operators have to do it."""
        if not self.function.is_compiled or not both.is_contiguous():
            return None
        both = both.view(both.shape[0], 2, -1)
        out = torch.empty_like(both[:, 0], memory_format=torch.contiguous_format)
        self.function(both, out)
        return out


class PromptTurn:
    """``turned``, once it is compiled.

    Attributes:
        function: What core may compile.
    """

    def __init__(self) -> None:
        self.function = CompiledFunction(TURNED)

    def __call__(
        self, heads: torch.Tensor, turning: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor | None:
        """The first ``turning`` (H) of ``heads`` bfloat16 [R, A, D], turned: [R, H, D]; None where
        operators have to do it. ``cos`` and ``sin`` [R, 1, D], contiguous."""
        rows, _, size = heads.shape
        if not self.function.is_compiled or cos.shape[-1] != size or not heads.is_contiguous():
            return None
        out = torch.empty((rows, turning, size), dtype=heads.dtype)
        cos, sin = cos.view(rows, 2, -1), sin.view(rows, 2, -1)
        self.function(
            heads.view(rows, -1, 2, size // 2), cos, sin, out.view(rows, -1, 2, size // 2)
        )
        return out
