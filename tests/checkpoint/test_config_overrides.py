"""Overrides of config.json, in every spelling of rotary parameters."""

from __future__ import annotations

from ingle.checkpoint.config_overrides import override_config

SCALING = {"rope_type": "yarn", "factor": 4.0}


def test_without_overrides_the_config_stays() -> None:
    assert override_config({"a": 1}, {}, {}) == {"a": 1}


def test_keys_are_replaced_and_added() -> None:
    assert override_config({"a": 1, "b": 2}, {"b": 3, "c": 4}, {}) == {"a": 1, "b": 3, "c": 4}


def test_scaling_joins_the_old_spelling() -> None:
    found = override_config({"rope_theta": 5.0, "rope_scaling": {"factor": 9}}, {}, SCALING)
    assert found == {"rope_theta": 5.0, "rope_scaling": SCALING}


def test_scaling_keeps_the_base_in_the_new_spelling() -> None:
    given = {"rope_theta": 5.0, "rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}
    found = override_config({"rope_parameters": given}, {}, SCALING)
    wanted = {"rope_theta": 5.0, "partial_rotary_factor": 0.5, **SCALING}
    assert found == {"rope_parameters": wanted}


def test_windowed_layers_keep_their_rotation() -> None:
    sliding = {"rope_type": "default", "rope_theta": 7.0}
    given = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": sliding}
    found = override_config({"rope_parameters": given}, {}, SCALING)
    assert found["rope_parameters"] == {
        "full_attention": {"rope_theta": 5.0, **SCALING},
        "sliding_attention": sliding,
    }
