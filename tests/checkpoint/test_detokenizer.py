"""Text that comes token by token equals text decoded at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingle.checkpoint.detokenizer import IncrementalDetokenizer
from ingle.checkpoint.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello, world! It's fine.",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷 and skin 👋🏽",
    "日本語のテキスト、中文文本，한국어",
    "مرحبا بالعالم — שלום",
    "e\u0301a\u0308\u0323 combining ก็ नमस्ते",
    "tabs\t\tand\n\nnewlines   and   spaces  ",
    "\ufffd a real replacement character \ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff",
]
BROKEN = "\ufffd"


@pytest.fixture(scope="module", params=["demo", "sentencepiece"])
def tokenizer(
    request: pytest.FixtureRequest, demo_model_dir: Path, sentencepiece_dir: Path
) -> Tokenizer:
    return load_tokenizer(demo_model_dir if request.param == "demo" else sentencepiece_dir)


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def added_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """What ``ids`` add to the prompt's text when everything is decoded at once."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert after.startswith(before)
    return after[len(before) :]


def ends_amid_bytes(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> bool:
    kept = [i for i in prompt if not (skip and i in tokenizer.special_ids)]
    token = tokenizer.id_to_token(kept[-1]) if kept else None
    return tokenizer.decode(prompt, skip).endswith(BROKEN) or (token or "").startswith("<0x")


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, [], ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_ends_in_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    if BROKEN not in text:
        assert all(BROKEN not in piece for piece in pieces(tokenizer, [], tokenizer.encode(text)))


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_into_prompt_and_output_gives_the_same_text(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        if not tokenizer.decode(prompt).endswith(BROKEN):
            joined = "".join(pieces(tokenizer, prompt, output))
            assert joined == added_text(tokenizer, prompt, output, True)


def test_the_first_word_after_a_prompt_keeps_its_space(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("The quick")
    output = tokenizer.encode("The quick brown fox")[len(prompt) :]
    assert "".join(pieces(tokenizer, prompt, output)) == " brown fox"


def test_plain_words_come_out_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat and the hat", add_special_tokens=False)
    assert all(pieces(tokenizer, [], ids)[:-1])


def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    ids = [*tokenizer.encode("the cat", add_special_tokens=False), end]
    shown = tokenizer.id_to_bytes(end).decode()
    assert "".join(pieces(tokenizer, [], ids, skip=True)) == "the cat"
    assert "".join(pieces(tokenizer, [], ids, skip=False)) == "the cat" + shown


def test_a_character_begun_in_the_prompt_belongs_to_the_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the \U0001fae0 end", add_special_tokens=False)
    prompt = next(ids[:n] for n in range(len(ids)) if tokenizer.decode(ids[:n])[-1:] == BROKEN)
    joined = "".join(pieces(tokenizer, prompt, ids[len(prompt) :]))
    assert joined == "\U0001fae0 end"


def test_half_a_character_in_the_prompt_does_not_leak(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the \U0001fae0", add_special_tokens=False)
    prompt = next(ids[:n] for n in range(len(ids)) if tokenizer.decode(ids[:n])[-1:] == BROKEN)
    output = tokenizer.encode("the cat", add_special_tokens=False)
    joined = "".join(pieces(tokenizer, prompt, output))
    assert joined.strip() == "the cat"


def test_bytes_that_never_become_a_character_show_as_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the \U0001fae0", add_special_tokens=False)[:-1]
    joined = "".join(pieces(tokenizer, [], ids))
    assert joined == tokenizer.decode(ids)
    assert joined.endswith(BROKEN)


def test_unknown_ids_give_nothing(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the cat", add_special_tokens=False), 10**6]
    assert "".join(pieces(tokenizer, [10**6], ids)) == "the cat"


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_decode_as_in_one_go(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(5)
    for _ in range(400):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(60))]
        joined = "".join(pieces(tokenizer, [], ids, skip))
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("skip", [True, False])
def test_random_outputs_after_random_prompts_add_the_same_text(
    tokenizer: Tokenizer, skip: bool
) -> None:
    rng = random.Random(6)
    for _ in range(400):
        prompt, ids = (
            [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))] for _ in "po"
        )
        # A prompt that ends amid bytes is taken or rejected together with the output's first ones.
        if not ends_amid_bytes(tokenizer, prompt, skip):
            expected = added_text(tokenizer, prompt, ids, skip)
            assert "".join(pieces(tokenizer, prompt, ids, skip)) == expected, (prompt, ids)


@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, [], ids, skip=False)) == tokenizer.decode(ids, False)
