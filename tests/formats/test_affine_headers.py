"""Headers of any kind are claimed or declined, never stumbled over."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingle.errors import CheckpointError
from ingle.plugin import CheckpointInfo, WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

ROLES = ("qweight", "qzeros", "scales", "scaled_zeros", "zeros", "g_idx", "B", "s", "weight")
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 128]), max_size=3).map(tuple)
HEADERS = st.dictionaries(
    st.sampled_from(ROLES),
    st.tuples(st.sampled_from(["I32", "I16", "I8", "I64", "F16", "BF16", "F32", "U8"]), SHAPES),
)
CONFIGS = st.dictionaries(
    st.sampled_from(["quant_method", "bits", "w_bit", "group_size", "sym", "version", "meta"]),
    st.one_of(st.none(), st.booleans(), st.integers(-1, 256), st.sampled_from(["awq", "gptq"])),
)


@pytest.mark.parametrize("weight_format", [AwqFormat(), GptqFormat()], ids=lambda f: f.name)
@settings(max_examples=300, deadline=None)
@given(headers=HEADERS, config=CONFIGS)
def test_any_headers_are_claimed_or_declined(
    weight_format: WeightFormat,
    headers: dict[str, tuple[str, tuple[int, ...]]],
    config: dict[str, object],
) -> None:
    info = CheckpointInfo(
        path=Path("/any"),
        hf_config={},
        quantization_config=config,
        tensor_shapes={f"a.{role}": shape for role, (_, shape) in headers.items()},
        tensor_dtypes={f"a.{role}": dtype for role, (dtype, _) in headers.items()},
    )
    if weight_format.detect(info) is None:
        return
    try:
        loader = weight_format.open(info)
    except CheckpointError:
        return
    for name in loader.linears():
        assert loader.packed_bytes(name) >= 0
        assert loader.tensor_names(name)
