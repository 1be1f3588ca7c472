"""The fast tokenizer that encodes as a SentencePiece model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from ingle.checkpoint.sentencepiece import PieceType, SentencePieceModel

SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""


def build_tokenizer(model: SentencePieceModel, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of ``model``; ``config`` is tokenizer_config.json.

    A text begins with the BOS token unless ``add_bos_token`` is false, and ends with the EOS token
    when ``add_eos_token`` is true, as transformers' Llama tokenizer has it.
    """
    backend = tokenizers.Tokenizer(_bpe(model) if model.is_bpe else _unigram(model))
    backend.normalizer = _normalizer(model)
    backend.decoder = _decoder(model)
    special = [p.text for p in model.pieces if p.type in (PieceType.CONTROL, PieceType.UNKNOWN)]
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special]
    )
    backend.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=False)
            for piece in model.pieces
            if piece.type is PieceType.USER_DEFINED
        ]
    )
    _add_configured(backend, config)
    _surround(backend, config)
    return backend


def _unknown(model: SentencePieceModel) -> int | None:
    kinds = [piece.type for piece in model.pieces]
    return kinds.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in kinds else None


def _bpe(model: SentencePieceModel) -> models.BPE:
    """Merges of every pair of pieces that makes a piece, the likeliest result first."""
    vocab = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    normal = {p.text: p.score for p in model.pieces if p.type is PieceType.NORMAL}
    ranked = sorted(
        (-score, vocab[text], text[:cut], text[cut:])
        for text, score in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )
    unknown = _unknown(model)
    return models.BPE(
        vocab=vocab,
        merges=[(left, right) for _, _, left, right in ranked],
        unk_token=None if unknown is None else model.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    vocab = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(vocab, _unknown(model), model.byte_fallback)


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def _add_configured(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json has, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])) if listed else ():
        added = AddedToken(
            token["content"],
            lstrip=bool(token.get("lstrip")),
            rstrip=bool(token.get("rstrip")),
            normalized=bool(token.get("normalized")),
            special=bool(token.get("special")),
        )
        (backend.add_special_tokens if added.special else backend.add_tokens)([added])


def _surround(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Has BOS put before and EOS after a text, as the configuration wants."""
    bos = _named(backend, config, "bos_token", "<s>")
    eos = _named(backend, config, "eos_token", "</s>")
    before = bos if config.get("add_bos_token", True) else None
    after = eos if config.get("add_eos_token", False) else None
    ids = [(text, backend.token_to_id(text)) for text in (before, after) if text is not None]
    if ids:
        single = [*([before] if before else []), "$A", *([after] if after else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=ids
        )


def _named(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str, usual: str
) -> str | None:
    value = config.get(name, usual)
    text = value.get("content") if isinstance(value, dict) else value
    known = isinstance(text, str) and backend.token_to_id(text) is not None
    return text if known else None
