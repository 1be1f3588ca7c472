"""Finds what core may compile for a model's prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.model.decoder import Decoder
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.prompt_functions import PromptGate, PromptTurn
from ingle.plugin.compiled_function import CompiledFunction


def prompt_functions(model: Decoder) -> list[CompiledFunction]:
    """The functions that ``model``'s layers call for prompts in bfloat16 on a CPU."""
    return list(_found(model.layers))


def _found(part: object) -> Iterator[CompiledFunction]:
    if isinstance(part, RMSNorm):
        yield part.of_prompts.function
    elif isinstance(part, ProjectionNorm):
        yield from _found(part.norm)
    elif isinstance(part, PromptGate | PromptTurn):
        yield part.function
    elif isinstance(part, PagedCPUAttention):
        yield part.joined
    elif isinstance(part, tuple):
        for one in part:
            yield from _found(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from _found(getattr(part, one.name))
