"""Folders with tokenizer.model alone encode and decode as SentencePiece itself does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from ingle.checkpoint.tokenizer import Tokenizer, load_tokenizer
from ingle.errors import CheckpointError

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven"),
    *("wizards", "boil", "tea", "and", "count", "numbers", "0123456789", "in", "Zürich", ","),
    *("Genève", "Łódź", ";", "they", "sing", ":", "la", "la", "!", "(why?)"),
]
CORPUS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(12)) for k in range(1, 60)]
TEXTS = [
    "the quick brown fox",
    "Hello, wizards! 12345",
    "Zürich über alles",
    "x",
    "",
    "日本語 😀 text",
    "two  spaces and\nlines\t",
    " leading and trailing ",
    "the the the thethe",
    "<pad> inside",
]
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe_as_llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram_without_bytes": {"model_type": "unigram", "byte_fallback": False},
    "bpe_without_prefix": {"model_type": "bpe", "add_dummy_prefix": False},
}


@pytest.fixture(scope="module", params=list(KINDS))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, sentencepiece.SentencePieceProcessor]:
    """A folder with tokenizer.model alone, and SentencePiece's own processor of it."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=file,
        vocab_size=400 if KINDS[request.param].get("byte_fallback") else 120,
        hard_vocab_limit=False,
        minloglevel=2,
        **KINDS[request.param],
    )
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    return folder, sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def test_text_becomes_the_same_tokens(
    trained: tuple[Path, sentencepiece.SentencePieceProcessor],
) -> None:
    folder, truth = trained
    tokenizer = load_tokenizer(folder)
    for text in [*TEXTS[:-1], *CORPUS]:
        assert tokenizer.encode(text, add_special_tokens=False) == truth.encode(text), text
        assert tokenizer.encode(text) == [truth.bos_id(), *truth.encode(text)]


def test_tokens_become_the_same_text(
    trained: tuple[Path, sentencepiece.SentencePieceProcessor],
) -> None:
    folder, truth = trained
    tokenizer = load_tokenizer(folder)
    for text in TEXTS[:5] + CORPUS:
        ids = truth.encode(text)
        if truth.unk_id() not in ids:
            assert tokenizer.decode(ids) == truth.decode(ids)
    assert tokenizer.vocab_size == truth.get_piece_size()
    assert {truth.bos_id(), truth.eos_id()} <= tokenizer.special_ids


def test_control_tokens_in_a_users_text_stay_text(
    trained: tuple[Path, sentencepiece.SentencePieceProcessor],
) -> None:
    folder, truth = trained
    tokenizer = load_tokenizer(folder)
    assert truth.eos_id() in tokenizer.encode("a</s>b")
    assert truth.eos_id() not in tokenizer.encode("a</s>b", allow_special=False)


def test_tokenizer_config_adds_tokens_and_decides_what_surrounds_a_text(
    trained: tuple[Path, sentencepiece.SentencePieceProcessor], tmp_path: Path
) -> None:
    folder, truth = trained
    size = truth.get_piece_size()
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": {str(size): {"content": "<|im_start|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer: Tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the fox") == [*truth.encode("the fox"), truth.eos_id()]
    assert tokenizer.token_to_id("<|im_start|>") == size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (truth.bos_id(), truth.eos_id())


@pytest.mark.parametrize("cut", [0, 1, 7, 200])
def test_a_damaged_file_is_named(
    trained: tuple[Path, sentencepiece.SentencePieceProcessor], tmp_path: Path, cut: int
) -> None:
    folder, _ = trained
    whole = (folder / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole[:cut] + b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
