"""Which kernel multiplies with a weight: chosen by priority, prepared, checked, or set aside.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ingle.errors import PluginError
from ingle.plugin import KernelUse, LinearWeight, MatmulKernel, Support
from ingle.registry.record import Offer
from ingle.registry.self_check import (
    Reference,
    make_reference,
    require_right,
    rows_to_check,
    run_kernel,
    sample_rows,
    self_check_key,
)
from ingle.registry.self_check_cache import SelfCheckCache

FALLBACK_KERNEL = "dequantize"
"""Core's kernel of last resort. It is not checked: ``dequantize`` is what right means."""
DEFAULT_MAX_RELATIVE_ERROR = 1e-2


class KernelChoice(NamedTuple):
    """The kernel, and a line for every candidate that came before it plus its own reason."""

    kernel: MatmulKernel
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLinear:
    """A weight ready to multiply with.

    Attributes:
        kernel: The kernel, right on this device for this kind of weight.
        weight: The weight as that kernel wants it.
        plugin: The plugin that gave the kernel.
        reasons: Why this kernel, and why not those of higher priority.
    """

    kernel: MatmulKernel
    weight: LinearWeight
    plugin: str
    reasons: tuple[str, ...]


class KernelSelector:
    """Chooses kernels for one device; what it has set aside once, it does not try again."""

    def __init__(
        self,
        kernels: Sequence[Offer[MatmulKernel]],
        checks: SelfCheckCache,
        max_relative_error: Mapping[str, float],
    ) -> None:
        """
        Args:
            kernels: What ``PluginRegistry.matmul_kernels(device)`` gives.
            checks: ``PluginRegistry.self_checks``.
            max_relative_error: The weight format's, by dtype name.
        """
        self._kernels = by_priority(kernels)
        self._checks = checks
        self._bounds = max_relative_error
        self._set_aside: dict[str, str] = {}
        self._warm: set[str] = set()
        self._last: tuple[LinearWeight, Reference] | None = None

    def prepare(self, weight: LinearWeight, use: KernelUse) -> PreparedLinear:
        """Prepares a freshly loaded weight (which it consumes) for its best right kernel.

        Raises:
            PluginError: When not even the fallback kernel is there or right.
        """
        return self._select(weight, use, repack=True)

    def choose(self, weight: LinearWeight, use: KernelUse) -> PreparedLinear:
        """The best right kernel for a weight as it is: for another row range of a prepared one.

        Raises:
            PluginError: When not even the fallback kernel is there or right.
        """
        return self._select(weight, use, repack=False)

    def _select(self, weight: LinearWeight, use: KernelUse, *, repack: bool) -> PreparedLinear:
        reasons: list[str] = []
        for offer in self._kernels:
            name = offer.item.name
            support = self._supports(offer, weight, use)
            if not support:
                reasons.append(f"{name}: {support.reason}")
                continue
            ready, weight = self._make_ready(offer, weight, use, repack)
            if ready:
                reasons.append(f"{name}: {support.reason}")
                return PreparedLinear(
                    kernel=offer.item, weight=weight, plugin=offer.plugin, reasons=tuple(reasons)
                )
            reasons.append(f"{name}: {self._set_aside[name]}")
        raise no_kernel(weight, use, reasons)

    def _supports(
        self, offer: Offer[MatmulKernel], weight: LinearWeight, use: KernelUse
    ) -> Support:
        if offer.item.name in self._set_aside:
            return Support(ok=False, reason=self._set_aside[offer.item.name])
        return ask_supports(offer, weight, use)

    def _make_ready(
        self, offer: Offer[MatmulKernel], weight: LinearWeight, use: KernelUse, repack: bool
    ) -> tuple[bool, LinearWeight]:
        """Prepares and checks. False: the kernel is set aside and the weight is fit for others."""
        kernel = offer.item
        repack = repack and type(kernel).prepare is not MatmulKernel.prepare
        key = self_check_key(offer.record, kernel, weight, use)
        reference, spare = None, None
        is_checked = kernel.name != FALLBACK_KERNEL and not use.device.is_absent
        if is_checked and self._checks.get(key) is None:
            reference = self._reference(weight)
            spare = copy_of(weight) if repack else weight
        prepared = offer.record.attempt(
            "self_check",
            lambda: self._prepare_and_check(kernel, weight, use, repack, reference, key),
            item=kernel.name,
        )
        if prepared is not None and self._warm_up(offer, prepared, use, key):
            self._last = (prepared, reference) if reference is not None else None
            return True, prepared
        self._set_aside[kernel.name] = offer.record.failures[-1].reason
        return False, spare or prepared or weight

    def _reference(self, weight: LinearWeight) -> Reference:
        """What the weight's product must be; the last weight's is kept for its other uses."""
        if self._last is not None and self._last[0] is weight:
            return self._last[1]
        return make_reference(weight)

    def _warm_up(
        self, offer: Offer[MatmulKernel], weight: LinearWeight, use: KernelUse, key: str
    ) -> bool:
        """Runs a kernel whose check is on file once, so that it compiles now and not under the
        first request. False: it raised."""
        if key in self._warm or offer.item.name == FALLBACK_KERNEL:
            return True
        self._warm.add(key)
        x = sample_rows(rows_to_check(use.rows)[-1], weight.in_features, use)
        product = offer.record.attempt(
            "warm_up", lambda: run_kernel(offer.item, weight, x), item=offer.item.name
        )
        return product is not None

    def _prepare_and_check(
        self,
        kernel: MatmulKernel,
        weight: LinearWeight,
        use: KernelUse,
        repack: bool,
        reference: Reference | None,
        key: str,
    ) -> LinearWeight:
        prepared = kernel.prepare(weight) if repack else weight
        if reference is not None:
            bound = self._bounds.get(dtype_name(use.dtype), DEFAULT_MAX_RELATIVE_ERROR)
            self._checks.add(key, require_right(kernel, prepared, reference, use, bound))
            self._warm.add(key)
        return prepared


def copy_of(weight: LinearWeight) -> LinearWeight:
    """The weight around tensors of its own: what is left when a kernel ruins the first."""
    return weight.with_tensors({name: tensor.clone() for name, tensor in weight.tensors().items()})


def choose_kernel(
    kernels: Sequence[Offer[MatmulKernel]], weight: LinearWeight, use: KernelUse
) -> KernelChoice:
    """The kernel of highest priority that supports a weight as it is, unchecked.

    A ``supports`` that raises is on its plugin's record and counts as no.

    Raises:
        PluginError: When none does; cannot happen while core's fallback kernel is among them.
    """
    reasons = []
    for offer in by_priority(kernels):
        support = ask_supports(offer, weight, use)
        reasons.append(f"{offer.item.name}: {support.reason}")
        if support:
            return KernelChoice(offer.item, tuple(reasons))
    raise no_kernel(weight, use, reasons)


def by_priority(kernels: Sequence[Offer[MatmulKernel]]) -> list[Offer[MatmulKernel]]:
    """Highest priority first; among equals an installed plugin before core, then by name."""
    return sorted(kernels, key=lambda o: (-o.item.priority, o.record.builtin, o.item.name))


def ask_supports(offer: Offer[MatmulKernel], weight: LinearWeight, use: KernelUse) -> Support:
    """The kernel's answer; no, with its failure as the reason, when asking raises."""
    item = f"{offer.item.name}.supports"
    answer = offer.record.attempt("supports", lambda: offer.item.supports(weight, use), item=item)
    if answer is None:
        return Support(ok=False, reason=f"supports() failed: {offer.record.failures[-1].reason}")
    return answer


def no_kernel(weight: LinearWeight, use: KernelUse, reasons: Sequence[str]) -> PluginError:
    """The error when no kernel serves a weight, with every kernel's reason."""
    return PluginError(
        f"No kernel multiplies {type(weight).__name__} "
        f"[{weight.stored_out_features}, {weight.in_features}] in {use.dtype} on "
        f"{use.device.torch_device}:\n" + "\n".join(reasons)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
