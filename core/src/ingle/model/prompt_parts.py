"""Finds what core may compile for a model's prompts."""

from __future__ import annotations

from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.model.decoder import Decoder
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.pieces import pieces
from ingle.model.prompt_functions import PromptGate, PromptTurn
from ingle.plugin.compiled_function import CompiledFunction


def prompt_functions(model: Decoder) -> list[CompiledFunction]:
    """The functions that ``model``'s layers call for prompts in bfloat16 on a CPU."""
    return [function for piece in pieces(model.layers) for function in _functions(piece)]


def _functions(piece: object) -> tuple[CompiledFunction, ...]:
    if isinstance(piece, ProjectionNorm):
        piece = piece.norm
    if isinstance(piece, RMSNorm):
        return (piece.of_prompts.function,)
    if isinstance(piece, PromptGate | PromptTurn):
        return (piece.function,)
    if isinstance(piece, PagedCPUAttention) and piece.softcap is None:
        rows = () if piece.rows is None else (piece.rows.function,)
        return (piece.joined, piece.products.function, *rows)
    return ()
