"""Grammars in the sampler: every answer matches, however its state was lost on the way."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch

from ingle.checkpoint.token_bytes import BYTE_LEVEL_ALPHABET
from ingle.errors import RequestError
from ingle.request import GrammarSpec, SamplingParams
from ingle.sampling.grammar import MAX_COMPILED, GrammarCompiler
from ingle.sampling.sampler import Sampler, SamplingRow
from ingle.sampling.stages import History

EOS = 256
VOCAB_SIZE = 260
OBJECT = GrammarSpec(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)


def tokenizer_json() -> str:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(dict(BYTE_LEVEL_ALPHABET), []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend.to_str()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json, VOCAB_SIZE, [EOS])


def logits(position: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * position + sum(name.encode()))
    return torch.randn(VOCAB_SIZE, generator=generator) * 3


def answers(samplers: list[Sampler], rows: dict[str, SamplingParams], steps: int = 40) -> list[str]:
    """Answers of several rows, step i by sampler i mod their number; ends at EOS."""
    outputs: dict[str, list[int]] = {name: [] for name in rows}
    for step in range(steps):
        live = [name for name in rows if EOS not in outputs[name]]
        batch = [
            SamplingRow(
                params=rows[name],
                seed=7,
                history=History(prompt_token_ids=(), output_token_ids=outputs[name]),
                sequence_id=name,
            )
            for name in live
        ]
        if not batch:
            break
        stacked = torch.stack([logits(len(outputs[name]), name) for name in live])
        drawn = samplers[step % len(samplers)](stacked, batch)
        for name, token in zip(live, drawn, strict=True):
            assert token.error is None
            outputs[name].append(token.token_id)
    return [bytes(t for t in outputs[name] if t < EOS).decode() for name in rows]


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        (GrammarSpec("choice", '["yes", "no", "\\"é\\n"]'), {"yes", "no", '"é\n'}),
        (GrammarSpec("regex", "a{2}|b"), {"aa", "b"}),
        (GrammarSpec("grammar", 'root ::= "up" | "down"'), {"up", "down"}),
        (GrammarSpec("lark", 'start: "up" | "down"'), {"up", "down"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_their_grammar(
    compiler: GrammarCompiler, spec: GrammarSpec, allowed: set[str], temperature: float
) -> None:
    params = SamplingParams(structured=spec, temperature=temperature)
    assert set(answers([Sampler([EOS], compiler)], {"a": params, "bb": params})) <= allowed


def test_lost_states_change_nothing(compiler: GrammarCompiler) -> None:
    params = SamplingParams(structured=OBJECT)
    rows = {"a": params, "b": SamplingParams(structured=GrammarSpec("regex", "[0-9]{12}"))}
    whole = answers([Sampler([EOS], compiler)], rows)
    # Each of three samplers sees every third step only, as if the states between were lost.
    assert answers([Sampler([EOS], compiler) for _ in range(3)], rows) == whole
    assert answers([Sampler([EOS], compiler)], {"a": params}) == whole[:1]


def test_a_state_can_go_back(compiler: GrammarCompiler) -> None:
    sampler = Sampler([EOS], compiler)
    params = SamplingParams(structured=GrammarSpec("regex", "abc"), temperature=0)

    def draw(output: list[int]) -> int:
        history = History(prompt_token_ids=(), output_token_ids=output)
        row = SamplingRow(params=params, seed=0, history=history, sequence_id="a")
        return sampler(logits(0, "a")[None], [row])[0].token_id

    assert [draw(list(b"ab")), draw([]), draw(list(b"a")), draw(list(b"abc"))] == [*b"cab", EOS]


def test_free_rows_beside_structured_ones_are_untouched(compiler: GrammarCompiler) -> None:
    history = History(prompt_token_ids=(), output_token_ids=())
    free = SamplingRow(params=SamplingParams(), seed=1, history=history, sequence_id="f")
    params = SamplingParams(structured=OBJECT)
    bound = SamplingRow(params=params, seed=1, history=history, sequence_id="g")
    alone = Sampler([EOS], compiler)(logits(0, "f")[None], [free])
    both = Sampler([EOS], compiler)(torch.stack([logits(0, "g"), logits(0, "f")]), [bound, free])
    assert both[1] == alone[0]
    assert both[0].token_id == ord("{")


def test_a_finished_grammar_ends_whatever_min_tokens_says(compiler: GrammarCompiler) -> None:
    params = SamplingParams(structured=GrammarSpec("regex", "ab"), min_tokens=9, max_tokens=10)
    assert answers([Sampler([EOS], compiler)], {"a": params}) == ["ab"]


def test_min_tokens_goes_on_where_the_grammar_can(compiler: GrammarCompiler) -> None:
    params = SamplingParams(structured=GrammarSpec("regex", "a+"), min_tokens=9, max_tokens=10)
    assert len(answers([Sampler([EOS], compiler)], {"a": params}, steps=9)[0]) == 9


def test_tokens_that_break_the_grammar_end_that_row_alone(compiler: GrammarCompiler) -> None:
    params = SamplingParams(structured=OBJECT)
    broken = History(prompt_token_ids=(), output_token_ids=list(b"no"))
    whole = History(prompt_token_ids=(), output_token_ids=())
    rows = [
        SamplingRow(params=params, seed=1, history=broken, sequence_id="a"),
        SamplingRow(params=params, seed=1, history=whole, sequence_id="b"),
    ]
    drawn = Sampler([EOS], compiler)(torch.stack([logits(0, "a"), logits(0, "b")]), rows)
    assert "grammar" in str(drawn[0].error)
    assert drawn[1].error is None


def test_a_sampler_without_grammars_ends_the_row() -> None:
    params = SamplingParams(structured=OBJECT)
    history = History(prompt_token_ids=(), output_token_ids=())
    row = SamplingRow(params=params, seed=1, history=history)
    assert Sampler([EOS])(logits(0, "a")[None], [row])[0].error is not None


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json", '{"type": "hiccup"}'),
        GrammarSpec("json", '{"$ref": "#/nowhere"}'),
        GrammarSpec("json", "{"),
        GrammarSpec("json", '{"enum": []}'),
        GrammarSpec("json", json.dumps({"properties": {f"p{i}": {} for i in range(3000)}})),
        GrammarSpec("json", '{"items":' * 100 + "{}" + "}" * 100),
        GrammarSpec("regex", "("),
        GrammarSpec("regex", "a" * 300_000),
        GrammarSpec("choice", json.dumps(["a"] * 5000)),
        GrammarSpec("grammar", "root ::= ("),
        GrammarSpec("lark", "start: nothing"),
    ],
)
def test_wrong_and_costly_grammars_are_refused(
    compiler: GrammarCompiler, spec: GrammarSpec
) -> None:
    with pytest.raises(RequestError):
        compiler.matcher(spec)


def test_compiled_grammars_are_kept_but_not_without_end(compiler: GrammarCompiler) -> None:
    specs = [GrammarSpec("regex", f"x{i}") for i in range(MAX_COMPILED + 1)]
    for spec in specs:
        compiler.matcher(spec)
    assert [compiler.is_compiled(spec) for spec in specs[:2]] == [False, True]


def test_json_has_no_blanks_between_its_parts(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(OBJECT)
    assert matcher.validate_tokens(list(b'{ "a"')) == 1
    assert matcher.validate_tokens(list(b'{"a":')) == 5
