"""What a user says in place of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_KEPT: Final = ("rope_theta", "partial_rotary_factor")
"""Rotary parameters that are none of the scaling's."""


def override_config(
    raw: Mapping[str, Any], changes: Mapping[str, Any], rope_scaling: Mapping[str, Any]
) -> Mapping[str, Any]:
    """``raw``, a parsed config.json, with ``changes`` to its keys and another rotary scaling.

    An empty ``rope_scaling`` leaves the scaling. Models that rotate windowed layers in a way of
    their own have the others scaled.
    """
    changed = {**raw, **changes}
    if not rope_scaling:
        return changed
    parameters = changed.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {**changed, "rope_scaling": dict(rope_scaling)}
    if "full_attention" in parameters:
        full = _scaled(parameters["full_attention"], rope_scaling)
        return {**changed, "rope_parameters": {**parameters, "full_attention": full}}
    return {**changed, "rope_parameters": _scaled(parameters, rope_scaling)}


def _scaled(parameters: Any, rope_scaling: Mapping[str, Any]) -> dict[str, Any]:
    given = parameters if isinstance(parameters, dict) else {}
    kept = {key: given[key] for key in _KEPT if key in given}
    return {**kept, **rope_scaling}
