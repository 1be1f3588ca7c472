"""What no source file may do: run data as code, read the environment, hide state or errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BARRED_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("multiprocessing", "code", "codeop"),  # the first pickles between processes
}
BARRED_CALLS = {"eval", "exec", "compile", "__import__"}
BARRED_ATTRIBUTES = {
    *("torch.load", "torch.serialization.load", "torch.jit.load", "torch.package.PackageImporter"),
    *("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "builtins.eval", "builtins.exec"),
}
BARRED_NAMES = {("torch", "load"), ("torch", "serialization"), ("numpy", "load"), ("yaml", "load")}
DANGEROUS = """
import pickle
import torch.serialization as s, marshal
from pickle import loads
from torch import load
from multiprocessing import Queue
eval("1")
exec("1")
compile("1", "", "exec")
__import__("os")
torch.load("x")
torch.jit.load("x")
yaml.load("x")
"""

MAY_READ_ENVIRONMENT = (
    "core/src/ingle/config.py",
    "core/src/ingle/plugin/cache_folder.py",
    "core/src/ingle/cli/",
    "server/src/ingle_server/config.py",
)
MAY_CATCH_EVERYTHING = (
    # The plugin border: a plugin may raise anything.
    "core/src/ingle/registry/record.py",
    "core/src/ingle/registry/self_check.py",
    # The engine loop: one row's failure, then one step's, then the thread's own end.
    "core/src/ingle/engine/engine_core.py",
    "core/src/ingle/engine/engine_thread.py",
    # A thread's border: what is raised in it is raised again in the one that waits.
    "core/src/ingle/engine/passing_thread.py",
    # The HTTP border: what an engine stream raises becomes an answer.
    "server/src/ingle_server/flight.py",
    "server/src/ingle_server/model_manager.py",
    "server/src/ingle_server/routes/model_admin.py",
    "server/src/ingle_server/streaming.py",
    # tokenizers raises a bare Exception for every kind of damage.
    "core/src/ingle/checkpoint/tokenizer.py",
)
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "deque"}


def test_nothing_is_unpickled_and_no_data_runs_as_code(sources: list[Any]) -> None:
    assert [line for source in sources for line in _dangers(source)] == []


def test_the_check_knows_a_danger_when_it_sees_one(sources: list[Any]) -> None:
    kind = type(sources[0])
    lines = DANGEROUS.strip().splitlines()
    for line in lines:
        source = kind(sources[0].path, line, ast.parse(line))
        assert len(list(_dangers(source))) == 1, line


def test_every_package_is_checked(root: Path, sources: list[Any]) -> None:
    projects = {path.parent for path in root.glob("*/pyproject.toml")}
    projects |= {path.parent for path in root.glob("plugins/*/pyproject.toml")}
    assert len(projects) >= 6
    for project in projects:
        files = set((project / "src").rglob("*.py"))
        assert files
        assert files <= {source.path for source in sources}


def test_remote_code_is_never_trusted(sources: list[Any]) -> None:
    trusting = [
        source.at(node, ast.unparse(node))
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.keyword)
        and node.arg == "trust_remote_code"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert trusting == []


def test_the_environment_is_read_only_where_options_are(sources: list[Any]) -> None:
    readers = [
        source.at(node, ast.unparse(node))
        for source in sources
        if not source.name.startswith(MAY_READ_ENVIRONMENT)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    ]
    assert readers == []


def test_no_module_keeps_state_in_globals(sources: list[Any]) -> None:
    assert [line for source in sources for line in _module_state(source)] == []


def test_everything_is_caught_only_at_the_three_borders(sources: list[Any]) -> None:
    broad = [
        source.at(node, "catches " + (ast.unparse(node.type) if node.type else "everything"))
        for source in sources
        if not source.name.startswith(MAY_CATCH_EVERYTHING)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    ]
    assert broad == []


def test_nothing_is_left_for_later(sources: list[Any]) -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    left = [
        f"{source.name}:{number} {line.strip()}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), start=1)
        if words.search(line)
    ]
    assert left == []


def _dangers(source: Any) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            if names & BARRED_MODULES:
                yield source.at(node, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {(module, alias.name) for alias in node.names}
            if module.partition(".")[0] in BARRED_MODULES or names & BARRED_NAMES:
                yield source.at(node, ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            BARRED_CALLS | BARRED_ATTRIBUTES
        ):
            yield source.at(node, ast.unparse(node.func))


def _module_state(source: Any) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield source.at(node, ast.unparse(node))
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = ast.unparse(target)
                if name != "__all__" and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name):
                    yield source.at(node, name)


def _is_mutable(value: ast.expr | None) -> bool:
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, displays)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
