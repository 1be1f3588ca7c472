"""Every rope type's frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ingle.checkpoint.rope_config import SUPPORTED_ROPE_TYPES, RopeConfig
from ingle.errors import CheckpointError
from ingle.model.rope_frequencies import rope_frequencies

LIST = {"short_factor": [1.1] * 16, "long_factor": [1.0 + i for i in range(16)]}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    "yarn by the ratio of lengths": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 128,
    },
    "yarn with every option": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.3,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn with its own gain": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 128, **LIST},
    "longrope with its own gain": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "attention_factor": 1.5,
        **LIST,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


@pytest.mark.parametrize("length", [100, 129, 512, 700])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: str, length: int) -> None:
    parameters = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={**parameters, "rope_theta": 5000.0},
    )
    wanted, gain = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)
    scaling = {key: value for key, value in parameters.items() if value is not None}
    rope = RopeConfig(theta=5000.0, rotary_dim=32, max_positions=512, scaling=scaling)
    found = rope_frequencies(rope, length)
    torch.testing.assert_close(found.inverse, wanted, rtol=1e-6, atol=0)
    assert found.gain == pytest.approx(gain)


def test_every_type_transformers_knows_is_supported() -> None:
    assert {*ROPE_INIT_FUNCTIONS, "default"} <= {*SUPPORTED_ROPE_TYPES}
    assert {case["rope_type"] for case in CASES.values()} | {"default"} == {*SUPPORTED_ROPE_TYPES}


def test_an_unknown_type_is_an_error() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=32, max_positions=512, scaling={"rope_type": "spiral"})
    with pytest.raises(CheckpointError, match=r"spiral.*default, linear"):
        rope_frequencies(rope, 512)
