"""Which linears of a checkpoint are packed, and how large each of them really is. No torch.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.linear import WeightLoader

PADDING: Final = 32
"""Writers that pad outputs pad them to whole multiples of this."""
MAX_PADDING: Final = 128
WORD_CODES: Final = 16
"""Most codes in a word: K may be so many more than what its words suggest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """One packed linear.

    Attributes:
        name: Checkpoint name without suffix.
        out_features: N without padding, as far as config.json tells.
        in_features: K.
        own_tensors: The tensors that its dense weight takes the place of.
        other_tensors: Tensors that it is made of and that are named after something else.
    """

    name: str
    out_features: int
    in_features: int
    own_tensors: tuple[str, ...]
    other_tensors: tuple[str, ...]


def plan_linears(info: CheckpointInfo, loader: WeightLoader) -> dict[str, PackedLinear]:
    """Every packed linear of ``loader``, by name."""
    sizes = _stated_sizes(info.hf_config)
    return {linear.name: linear for linear in _packed_linears(loader, sizes)}


def _packed_linears(
    loader: WeightLoader, sizes: Mapping[str, tuple[int, int]]
) -> Iterator[PackedLinear]:
    for name, (stored_out, stored_in) in loader.linears().items():
        tensors = loader.tensor_names(name)
        if tensors in ((f"{name}.weight",), (name,)):
            continue
        outputs, inputs = sizes.get(name.rpartition(".")[2], (0, 0))
        own = tuple(tensor for tensor in tensors if tensor.startswith(f"{name}."))
        yield PackedLinear(
            name=name,
            out_features=outputs if _is_padding(outputs, stored_out) else stored_out,
            in_features=inputs if _is_word_end(inputs, stored_in) else stored_in,
            own_tensors=own,
            other_tensors=tuple(tensor for tensor in tensors if tensor not in own),
        )


def _is_padding(wanted: int, stored: int) -> bool:
    """Whether ``stored`` outputs can only be ``wanted`` ones and padding."""
    odd = wanted % PADDING != 0 and stored % PADDING == 0
    return wanted > 0 and odd and 0 < stored - wanted < MAX_PADDING


def _is_word_end(wanted: int, stored: int) -> bool:
    """Whether ``stored`` inputs may be ``wanted`` ones: headers give them to the word, at most 16
    codes of 2 bits, or a unit of rows."""
    return wanted > 0 and -WORD_CODES < stored - wanted < PADDING


def _stated_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(N, K) by the last part of a linear's name, as config.json states them; 0: it does not."""
    text = config.get("text_config")
    facts = {**config, **text} if isinstance(text, Mapping) else config
    hidden, heads = _number(facts, "hidden_size"), _number(facts, "num_attention_heads")
    width = _number(facts, "head_dim") or (hidden // heads if heads else 0)
    queries, inner = heads * width, _number(facts, "intermediate_size")
    keys = (_number(facts, "num_key_value_heads") or heads) * width
    return {
        "lm_head": (_number(facts, "vocab_size"), hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _number(facts: Mapping[str, Any], key: str) -> int:
    value = facts.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
