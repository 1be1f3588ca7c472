"""Grammars that an answer must follow, compiled by llguidance. No torch here.

A compiled grammar is kept and copied for each sequence that uses it; see
``docs/decisions/structured-output.md``.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from ingle.errors import RequestError
from ingle.request import GrammarSpec

PARAM = "structured_outputs"
MAX_CHARS = 262_144
MAX_DEPTH = 64
MAX_PROPERTIES = 2000
"""Of one object: compiling optional properties takes time that grows with their square."""
MAX_CHOICES = 2000
MAX_COMPILED = 64


class GrammarCompiler:
    """Turns grammars into matchers for one vocabulary. Safe to use from several threads.

    Args:
        tokenizer_json: Gives the text of tokenizer.json; asked once, at the first grammar.
        vocab_size: Rows of the output layer.
        eos_token_ids: Tokens that end a sequence; a finished grammar allows these alone.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        # Guards the two above; compiling itself is outside of it, except the vocabulary's.
        self._lock = threading.Lock()

    def is_compiled(self, spec: GrammarSpec) -> bool:
        """Whether ``matcher`` would answer at once."""
        with self._lock:
            return spec in self._compiled

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """A new matcher at the grammar's beginning. The first time this may take a second.

        Raises:
            RequestError: When the grammar is wrong, too large, or allows no text at all.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
                return found.deep_copy()
        matcher = self._compile(spec)
        with self._lock:
            self._compiled[spec] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        if not self._eos_token_ids:
            raise RequestError("This model has no end-of-sequence token to end with.", param=PARAM)
        matcher = LLMatcher(
            self._tokens(), source(spec), log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        # The first mask finds what construction leaves for later.
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _refuse(matcher.get_error())
        if not any(allowed):
            raise _refuse("no text can match it")
        return matcher

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer_json(),
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_token_ids,
                    )
                except ValueError as error:  # more tokens than the model has rows, say
                    raise _refuse(f"the model's tokenizer does not serve: {error}") from None
            return self._vocabulary


def source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form.

    Raises:
        RequestError: When it is too large, or no grammar at all.
    """
    if len(spec.text) > MAX_CHARS:
        raise _refuse(f"it has {len(spec.text)} characters; at most {MAX_CHARS} are taken")
    try:
        return _source(spec)
    except (ValueError, RecursionError) as error:
        raise _refuse(str(error)) from None


def _source(spec: GrammarSpec) -> str:
    if spec.kind == "json":
        schema = json.loads(spec.text)
        check_schema(schema)
        # A small model that may write blanks between the parts writes nothing else.
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(_choices(json.loads(spec.text)))
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    return LLMatcher.grammar_from_lark(_lark(spec.text))


def _choices(choices: list[str]) -> str:
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"it has {len(choices)} choices; at most {MAX_CHOICES} are taken")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except (GbnfToLarkError, LookupError) as error:
        raise ValueError(str(error)) from None


def check_schema(schema: Any) -> None:
    """Refuses schemas that take too long to compile.

    Raises:
        ValueError: Saying which limit was passed.
    """
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(node, dict) and len(node) > MAX_PROPERTIES:
            raise ValueError(f"an object has {len(node)} entries; at most {MAX_PROPERTIES} do")


def _nodes(root: Any) -> Iterator[tuple[Any, int]]:
    """Every value in ``root`` with its depth; without recursion, so that depth is no danger."""
    pending = [(root, 0)]
    while pending:
        node, depth = pending.pop()
        yield node, depth
        children = node.values() if isinstance(node, dict) else node
        if isinstance(node, dict | list):
            pending.extend((child, depth + 1) for child in children)


def _refuse(reason: str) -> RequestError:
    shown = " ".join(reason.split())
    return RequestError(f"The grammar can't be used: {shown[:300]}", param=PARAM)
