"""Which layers attend to a sliding window, and how long it is."""

from __future__ import annotations

from ingle.checkpoint.architectures import Architecture
from ingle.checkpoint.config_values import ConfigValues
from ingle.checkpoint.rope_config import turned_layers


def read_windows(
    config: ConfigValues, traits: Architecture, num_layers: int
) -> tuple[int | None, tuple[str, ...]]:
    """The window and each layer's kind, as transformers' config classes derive them."""
    full = ("full_attention",) * num_layers
    on = traits.windowed == "always"
    if traits.windowed == "flag":
        on = config.flag("use_sliding_window", False)
    if not on:
        return None, full
    # A null in the file means no window; a key that is not there means the class's default.
    absent = not config.present("sliding_window")
    window = traits.sliding_window if absent else config.optional_size("sliding_window")
    if window is None and traits.sliding_rope_theta is None:
        return None, full
    kinds = _layer_types(config, traits, num_layers)
    if window is None:
        # Without a window, layers of the windowed kind still have a rotation of their own.
        return None, kinds
    return (window, kinds) if "sliding_attention" in kinds else (None, full)


def _layer_types(config: ConfigValues, traits: Architecture, num_layers: int) -> tuple[str, ...]:
    given = config.raw("layer_types")
    if given is not None:
        known = ("full_attention", "sliding_attention")
        valid = isinstance(given, list) and len(given) == num_layers
        if not valid or any(kind not in known for kind in given):
            wanted = f"a list of {num_layers} of {' and '.join(known)}"
            raise config.wrong("layer_types", given, wanted)
        return tuple(given)
    windowed = [_has_window(config, traits, layer) for layer in range(num_layers)]
    return tuple("sliding_attention" if one else "full_attention" for one in windowed)


def _has_window(config: ConfigValues, traits: Architecture, layer: int) -> bool:
    """Whether ``layer`` has a window by the architecture's own pattern."""
    pattern = traits.window_pattern
    if pattern == "upper":
        return layer >= config.size("max_window_layers", 28, low=0)
    if pattern == "lower_alternate":
        return layer % 2 == 0 and layer < config.size("max_window_layers", 28, low=0)
    if pattern == "periodic":
        return (layer + 1) % config.size("sliding_window_pattern", traits.window_period) != 0
    if pattern == "unturned":
        return not turned_layers(config, traits, layer + 1)[layer]
    return True
