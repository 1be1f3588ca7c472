"""Functions do one thing, files are one noun."""

from __future__ import annotations

import ast
from typing import Any

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400
MAX_PARAMETERS = 6
BARRED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def test_no_function_is_longer_than_80_lines(sources: list[Any]) -> None:
    long = [
        source.at(function, f"{function.name} has {_length(function)} lines")
        for source in sources
        if not source.is_kernel
        for function in source.functions()
        if _length(function) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_is_longer_than_400_lines(sources: list[Any]) -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_takes_more_than_six_parameters(sources: list[Any]) -> None:
    wide = [
        source.at(function, f"{function.name} takes {_parameters(function)}")
        for source in sources
        if not source.is_kernel
        for function in source.functions()
        if _parameters(function) > MAX_PARAMETERS and not _is_triton(function)
    ]
    assert wide == []


def test_no_module_is_called_utils_helpers_or_common(sources: list[Any]) -> None:
    parts = {source.name: {*source.path.with_suffix("").parts} for source in sources}
    assert [name for name, names in parts.items() if names & BARRED_NAMES] == []


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def _is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)
