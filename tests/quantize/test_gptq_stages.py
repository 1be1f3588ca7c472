"""How GPTQ goes through a block: stages, experts that saw too little, modules that differ."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from ingle.plugin import LinearSite
from ingle_quant_gptq.making.maker import GptqQuantizer, pack
from ingle_quant_gptq.making.options import GptqOptions
from ingle_quant_gptq.making.solve import round_to_nearest

P = "model.layers.0"
INPUTS = 32


def site(*leaves: str, part: str = "feed_forward") -> LinearSite:
    names = tuple(f"{P}.{leaf}" for leaf in leaves)
    return LinearSite(names=names, part=part)  # type: ignore[arg-type]


LAYER = (
    site("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", part="attention"),
    site("self_attn.o_proj", part="attention"),
    site("mlp.gate_proj", "mlp.up_proj"),
    site("mlp.down_proj"),
)


class Block:
    """A block of random weights whose sites see as many random tokens as they are told to."""

    name, index, num_blocks, row_length, hidden = P, 0, 1, 8, None

    def __init__(self, sites: tuple[LinearSite, ...], tokens: dict[str, int] | None = None) -> None:
        torch.manual_seed(0)
        self.sites = sites
        self.weights = {name: torch.randn(16, INPUTS) for s in sites for name in s.names}
        self.originals = dict(self.weights)
        self.observed: list[tuple[str, set[str]]] = []
        self._tokens = tokens or {}

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        self.weights[name] = weight

    def observe(
        self, see: Callable[[LinearSite, torch.Tensor], None], last: LinearSite | None = None
    ) -> None:
        done = {name for name, w in self.weights.items() if w is not self.originals[name]}
        self.observed.append((last.names[0] if last else "", done))
        for number, one in enumerate(self.sites):
            generator = torch.Generator().manual_seed(number)
            count = self._tokens.get(one.names[0], 600)
            see(one, torch.randn(count, INPUTS, generator=generator))
            if last is not None and one.names == last.names:
                return


def packed(options: GptqOptions, block: Block) -> dict[str, dict[str, torch.Tensor]]:
    made = GptqQuantizer(options).quantize_block(block)  # type: ignore[arg-type]
    return {name: dict(parts) for name, parts in made.items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_true_sequential_shows_each_stage_inputs_that_the_stages_before_have_quantised() -> None:
    block = Block(LAYER)
    packed(GptqOptions(group_size=16), block)
    first, second, third = (set(s.names) for s in LAYER[:3])
    assert [last for last, _ in block.observed] == [s.names[0] for s in LAYER]
    assert [done for _, done in block.observed] == [
        set(),
        first,
        first | second,
        first | second | third,
    ]


def test_without_it_the_block_is_observed_once_as_it_was() -> None:
    block = Block(LAYER)
    packed(GptqOptions(group_size=16, true_sequential=False), block)
    assert [done for _, done in block.observed] == [set()]


@pytest.mark.parametrize("tokens", [0, 2])
def test_an_expert_that_saw_too_little_is_rounded_to_nearest(tokens: int) -> None:
    experts = tuple(site(f"mlp.experts.{i}.gate_proj") for i in range(2))
    rare = experts[1].names[0]
    block = Block(experts, {rare: tokens})
    options = GptqOptions(group_size=16)
    found = packed(options, block)
    for one in experts:
        name = one.names[0]
        plain = pack(round_to_nearest(block.originals[name], options), 4, False)
        assert same(found[name], plain) == (name == rare)


def test_an_expert_above_the_least_share_is_calibrated() -> None:
    experts = tuple(site(f"mlp.experts.{i}.gate_proj") for i in range(2))
    rare = experts[1].names[0]
    block = Block(experts, {rare: 40})
    options = GptqOptions(group_size=16)
    plain = pack(round_to_nearest(block.originals[rare], options), 4, False)
    assert not same(packed(options, block)[rare], plain)


def test_modules_that_differ_are_made_with_their_own_options_and_some_stay_dense() -> None:
    rules = {
        "-:.*o_proj": {},
        ".*down_proj": {"bits": 8, "group_size": 32},
        ".*v_proj": {"bits": 2},
    }
    found = packed(GptqOptions(group_size=16, dynamic=json.dumps(rules)), Block(LAYER))
    assert f"{P}.self_attn.o_proj" not in found
    rows = {name.rpartition(".")[2]: len(parts["qweight"]) for name, parts in found.items()}
    assert (rows["down_proj"], rows["v_proj"], rows["q_proj"]) == (8, 2, 4)
    assert len(found[f"{P}.mlp.down_proj"]["scales"]) == 1
    assert len(found[f"{P}.self_attn.q_proj"]["scales"]) == 2
