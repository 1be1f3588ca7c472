"""Which format reads a checkpoint, and which formats hold the cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ingle.errors import ConfigError, IngleError, PluginError
from ingle.plugin import CheckpointInfo, Detection, DeviceInfo, KVCacheFormat, WeightFormat
from ingle.registry.plugin_registry import PluginRegistry
from ingle.registry.record import Offer, spelling
from ingle.registry.report import PluginReport

T = TypeVar("T", WeightFormat, KVCacheFormat)

AUTO = "auto"
VARIETY_KEYS = ("format", "quant_algo", "quant_type", "checkpoint_format", "fmt")
"""Where configurations say which of a method's kinds they are."""
FLOATS = frozenset(("BF16", "F16", "F32", "F64"))
SIDECAR_FILES = ("quantize_config.json", "quant_config.json")
"""Where checkpoints older than ``quantization_config`` say how they were quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenFormat:
    """The weight format that reads the checkpoint, and why.

    Attributes:
        format: The format.
        plugin: The plugin it came from.
        distribution: That plugin's package.
        version: That package's version.
        reason: The detection's reason.
    """

    format: WeightFormat
    plugin: str
    distribution: str
    version: str
    reason: str


def choose_weight_format(
    registry: PluginRegistry, info: CheckpointInfo, requested: str
) -> ChosenFormat:
    """The format that reads ``info``.

    Args:
        registry: The loaded plugins.
        info: The checkpoint.
        requested: ``auto``, or a format's name or alias.

    Raises:
        PluginError: When nobody or more than one claims the checkpoint, or the format asked for
            is absent, failed, or cannot read it.
    """
    offers = registry.weight_formats()
    if spelling(requested) == AUTO:
        best = best_claim(offers, info, "--quantization")
        if best is None:
            raise unread(registry, info)
        return chosen(*best)
    offer = find_by_name(registry, offers, requested, "--quantization")
    detection = ask(offer, info)
    if detection is None:
        raise misfit(offers, offer, info, requested)
    return chosen(offer, detection)


def choose_kv_cache_formats(
    registry: PluginRegistry, requested: str, info: CheckpointInfo, device: DeviceInfo
) -> tuple[KVCacheFormat, KVCacheFormat]:
    """The formats for keys and for values.

    Args:
        registry: The loaded plugins.
        requested: ``auto``, a format's name or alias, or ``k=NAME,v=NAME``.
        info: The checkpoint: it may ask for a cache format of its own.
        device: Where the cache will live.

    Raises:
        ConfigError: When ``requested`` cannot be understood.
        PluginError: When a format is absent, failed, or claimed by two plugins.
    """
    offers = registry.kv_cache_formats(device)
    sides = parse_sides(requested)
    picked = {name: pick_cache(registry, offers, name, info) for name in set(sides)}
    return picked[sides[0]], picked[sides[1]]


def pick_cache(
    registry: PluginRegistry,
    offers: Sequence[Offer[KVCacheFormat]],
    name: str,
    info: CheckpointInfo,
) -> KVCacheFormat:
    """One cache format. ``auto`` is what the checkpoint asks for, else the format of that name."""
    if spelling(name) == AUTO:
        best = best_claim(offers, info, "--kv-cache-dtype")
        if best is not None:
            return best[0].item
    return find_by_name(registry, offers, name, "--kv-cache-dtype").item


def parse_sides(requested: str) -> tuple[str, str]:
    """The names for keys and values: ``fp8`` is both, ``k=fp8`` leaves values at ``auto``.

    Raises:
        ConfigError: When it is neither a name nor ``k=NAME,v=NAME``.
    """
    if "=" not in requested:
        return requested, requested
    sides: dict[str, str] = {}
    for part in requested.split(","):
        side, _, name = (piece.strip() for piece in part.partition("="))
        if side not in ("k", "v") or not name or side in sides:
            raise ConfigError(
                f"--kv-cache-dtype must be a name or k=NAME,v=NAME; got {requested!r}."
            )
        sides[side] = name
    return sides.get("k", AUTO), sides.get("v", AUTO)


def best_claim(
    offers: Sequence[Offer[T]], info: CheckpointInfo, option: str
) -> tuple[Offer[T], Detection] | None:
    """The claim with the highest priority, or None when there is none.

    Raises:
        PluginError: When two claims share it, naming both.
    """
    claims = [(offer, claim) for offer in offers if (claim := ask(offer, info)) is not None]
    if not claims:
        return None
    top = max(claim.priority for _, claim in claims)
    winners = [(offer, claim) for offer, claim in claims if claim.priority == top]
    if len(winners) > 1:
        named = " and ".join(f"{o.item.name} of {o.record.label}" for o, _ in winners)
        raise PluginError(
            f"{named} claim {info.path} with the same priority {top}; "
            f"choose with {option} {winners[0][0].item.name} or disable one with --disable-plugin."
        )
    return winners[0]


def ask(offer: Offer[T], info: CheckpointInfo) -> Detection | None:
    """One format's claim; a ``detect`` that raises is on record and claims nothing."""
    item = f"{offer.item.name}.detect"
    return offer.record.attempt("supports", lambda: offer.item.detect(info), item=item)


def find_by_name(
    registry: PluginRegistry, offers: Sequence[Offer[T]], requested: str, option: str
) -> Offer[T]:
    """The format of that name or alias, from a plugin of which nothing has failed.

    Raises:
        PluginError: When there is none, more than one, or its plugin failed: then with the
            plugin's own traceback.
    """
    found = [offer for offer in offers if answers_to(offer.item, requested)]
    if len(found) > 1:
        named = " and ".join(offer.record.label for offer in found)
        raise PluginError(
            f"{option} {requested}: {named} both offer it; disable one with --disable-plugin."
        )
    if not found:
        raise absent(registry, offers, requested, option)
    if found[0].record.failures:
        raise broken(found[0].record.report(), f"{option} {requested}")
    return found[0]


def answers_to(item: WeightFormat | KVCacheFormat, requested: str) -> bool:
    """Whether ``requested`` is the format's name or an alias of it."""
    return spelling(requested) in {spelling(name) for name in (item.name, *item.aliases)}


def absent(
    registry: PluginRegistry, offers: Sequence[Offer[T]], requested: str, option: str
) -> PluginError:
    """The error for a name that no loaded plugin offers."""
    kind = "quant" if option == "--quantization" else "kv"
    package = f"ingle-{kind}-{spelling(requested)}"
    failed = registry.failed_plugin(
        requested, package, f"{kind}_{requested}", f"{kind}-{requested}"
    )
    if failed is not None:
        return broken(failed, f"{option} {requested}")
    known = ", ".join(sorted(offer.item.name for offer in offers))
    lines = [f"{option} {requested}: no plugin offers it. Offered: {known}."]
    lines += [f"{p.name} ({p.distribution}) failed: {p.reason}" for p in registry.report.failed]
    lines += disabled_lines(registry, package)
    if re.fullmatch(r"[a-z0-9-]+", spelling(requested)):
        lines.append(f"If it is a format of its own, install its plugin: pip install {package}")
    return PluginError("\n".join(lines))


def broken(plugin: PluginReport, asked: str) -> PluginError:
    """The error for a plugin that was asked for and failed, with its own traceback."""
    message = f"{asked}: plugin {plugin.name} ({plugin.distribution} {plugin.version}) failed"
    return PluginError(f"{message} at {plugin.reason}\n\n{plugin.traceback}".rstrip())


def misfit(
    offers: Sequence[Offer[WeightFormat]],
    offer: Offer[WeightFormat],
    info: CheckpointInfo,
    requested: str,
) -> PluginError:
    """The error for a format that was asked for and does not read this checkpoint."""
    if any(failure.item == f"{offer.item.name}.detect" for failure in offer.record.failures):
        return broken(offer.record.report(), f"--quantization {requested}")
    readers = [o for o in offers if o is not offer and ask(o, info) is not None]
    hint = "".join(f" --quantization {o.item.name} reads it." for o in readers)
    why = "" if readers else f" {refusal(offer, info)}".rstrip()
    return PluginError(
        f"--quantization {requested}: {offer.item.name} cannot read {info.path}, "
        f"which is {describe_checkpoint(info)}.{hint}{why}"
    )


def refusal(offer: Offer[WeightFormat], info: CheckpointInfo) -> str:
    """What the format says when it is made to open a checkpoint that it does not claim."""
    try:
        offer.item.open(info)
    except IngleError as error:
        return str(error)
    return ""


def unread(registry: PluginRegistry, info: CheckpointInfo) -> PluginError:
    """The error for a checkpoint nobody claims: what it is, and which package would read it."""
    lines = [f"No plugin reads {info.path}, which is {describe_checkpoint(info)}."]
    method = quant_method(info)
    package = f"ingle-quant-{spelling(method)}" if method else ""
    failed = registry.failed_plugin(method, package) if method else None
    if failed is not None:
        return broken(failed, lines[0])
    lines += [f"{p.name} ({p.distribution}) failed: {p.reason}" for p in registry.report.failed]
    turned_off = disabled_lines(registry, package)
    own = [offer for offer in registry.weight_formats() if answers_to(offer.item, method)]
    if own:
        said = f"{own[0].item.name} of {own[0].record.label} does not claim it."
        return PluginError("\n".join([*lines, f"{said} {refusal(own[0], info)}".rstrip()]))
    if not method:
        lines += damage(registry, info)
    if method and not turned_off and re.fullmatch(r"[a-z0-9-]+", spelling(method)):
        turned_off = [f"pip install {package}"]
    return PluginError("\n".join([*lines, *turned_off]))


def damage(registry: PluginRegistry, info: CheckpointInfo) -> list[str]:
    """What the formats that know some tensors of a checkpoint find wrong with them, one line each:
    for files that say nothing of how they were quantised."""
    said = [(offer.item.name, refusal(offer, info)) for offer in registry.weight_formats()]
    return [
        f"As {name}: {text}" for name, text in said if any(n in text for n in info.tensor_names)
    ]


def disabled_lines(registry: PluginRegistry, package: str) -> list[str]:
    """A line when the package that would help is installed but disabled."""
    disabled = [p for p in registry.report.plugins if p.status == "disabled"]
    return [
        f"{p.distribution} is installed but disabled: drop --disable-plugin {p.name}"
        for p in disabled
        if spelling(p.distribution) == package
    ]


def describe_checkpoint(info: CheckpointInfo) -> str:
    """What a checkpoint is, as far as its files say: for messages."""
    method = quant_method(info)
    if method:
        return f"quantised with quant_method {method!r}{variety(info)}{packed_kinds(info)}"
    if info.quantization_config:
        keys = ", ".join(sorted(info.quantization_config))
        return f"quantised: quantization_config has {keys}{variety(info)}{packed_kinds(info)}"
    suffixes = Counter(name.rpartition(".")[2] for name in info.tensor_shapes)
    if not suffixes:
        return "without tensors"
    common = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(6))
    return f"a checkpoint without quantization_config whose tensors are {common}"


def variety(info: CheckpointInfo) -> str:
    """Which kind of its method a checkpoint says it is, or an empty string."""
    config = info.quantization_config or {}
    named = [f"{key} {config[key]!r}" for key in VARIETY_KEYS if isinstance(config.get(key), str)]
    return f" ({', '.join(named)})" if named else ""


def packed_kinds(info: CheckpointInfo) -> str:
    """What the packed tensors of a checkpoint are called, with their dtypes, or an empty string."""
    kinds = Counter(
        f"{name.rpartition('.')[2]} ({info.tensor_dtypes[name]})"
        for name, shape in info.tensor_shapes.items()
        if len(shape) > 1 and info.tensor_dtypes[name] not in FLOATS
    )
    named = ", ".join(kind for kind, _ in kinds.most_common(4))
    return f", with packed tensors {named}" if named else ""


def quant_method(info: CheckpointInfo) -> str:
    """The quantisation method that a checkpoint's files name, or an empty string."""
    configs: list[Any] = [info.quantization_config or {}]
    configs += [info.config_files.get(name, {}) for name in SIDECAR_FILES]
    found = (config.get("quant_method") for config in configs)
    return next((method for method in found if isinstance(method, str) and method), "")


def chosen(offer: Offer[WeightFormat], detection: Detection) -> ChosenFormat:
    """The choice as plain facts."""
    return ChosenFormat(
        format=offer.item,
        plugin=offer.plugin,
        distribution=offer.record.distribution,
        version=offer.record.version,
        reason=detection.reason,
    )
