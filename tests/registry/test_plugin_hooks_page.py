"""The contract's page is checked against the contract, and the contract against its last text."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingle.plugin
from ingle.plugin import hookspecs
from ingle.registry.loader import hook_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plugin_hooks.md"
SURFACE = Path(__file__).parent / "plugin_surface.txt"
REGENERATE = (
    "PYTHONPATH=core/src python tests/registry/test_plugin_hooks_page.py"
    " > tests/registry/plugin_surface.txt"
)


def public_names() -> list[str]:
    """Every name of the contract; each resolves."""
    names = sorted(ingle.plugin.__all__)
    for name in names:
        getattr(ingle.plugin, name)
    return names


def surface() -> str:
    """Every public name and signature of ``ingle.plugin``, as text."""
    lines = []
    for name in public_names():
        lines.extend(describe(name, getattr(ingle.plugin, name)))
    for name in sorted(hook_names()):
        lines.append(f"hook {name}{signature(getattr(hookspecs, name))}")
    return "\n".join(lines) + "\n"


def describe(name: str, value: object) -> Iterator[str]:
    """One public name: a class with its members, or a value."""
    if not inspect.isclass(value):
        shown = f" = {value!r}" if isinstance(value, str | tuple) else ""
        yield f"value {name}{shown}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__)
    yield f"class {name}({bases})"
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            factory = "" if field.default_factory is dataclasses.MISSING else " = ..."
            yield f"    field {field.name}: {field.type}{default}{factory}"
    else:
        for attribute, kind in sorted(inspect.get_annotations(value).items()):
            default = f" = {vars(value)[attribute]!r}" if attribute in vars(value) else ""
            yield f"    attribute {attribute}: {kind}{default}"
    for member, found in sorted(vars(value).items()):
        if member == "__call__" or not member.startswith("_"):
            yield from describe_member(member, found)


def describe_member(name: str, found: object) -> Iterator[str]:
    """One method or property of a class."""
    plain = getattr(found, "__func__", found)
    if isinstance(found, property):
        yield f"    property {name}{signature(found.fget).removeprefix('(self)')}"
    elif inspect.isfunction(plain):
        marks = "abstract " if getattr(plain, "__isabstractmethod__", False) else ""
        marks += type(found).__name__ + " " if plain is not found else ""
        yield f"    {marks}method {name}{signature(plain)}"


def signature(function: object) -> str:
    """A signature without quotation marks, which Python versions set differently."""
    return re.sub("['\"]", "", str(inspect.signature(function)))


def test_the_contract_is_the_one_written_down() -> None:
    assert surface() == SURFACE.read_text(), (
        "the plugin contract changed. If that is meant, raise API_VERSION where plugins must "
        f"notice, update docs/plugin_hooks.md, and run\n    {REGENERATE}"
    )


@pytest.mark.parametrize("hook", sorted(hook_names()))
def test_every_hook_is_on_the_page_with_its_exact_arguments(hook: str) -> None:
    signature = inspect.signature(getattr(hookspecs, hook))
    heading = f"## `{hook}({', '.join(signature.parameters)})`"
    assert heading in PAGE.read_text().splitlines(), f"{PAGE.name} lacks the heading {heading}"


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text(), f"{PAGE.name} does not mention `{name}`"


@pytest.mark.parametrize(
    "owner", ["WeightFormat", "WeightLoader", "LinearWeight", "MatmulKernel", "KVCacheFormat"]
)
def test_every_method_is_on_the_page_with_its_exact_arguments(owner: str) -> None:
    page = PAGE.read_text()
    for name, found in vars(getattr(ingle.plugin, owner)).items():
        if inspect.isfunction(found) and not name.startswith("_"):
            arguments = list(inspect.signature(found).parameters)[1:]
            written = f"`{name}({', '.join(arguments)})`"
            assert written in page, f"{PAGE.name} lacks {owner} {written}"


def test_the_page_states_the_api_version() -> None:
    assert f"INGLE_PLUGIN_API = {ingle.plugin.API_VERSION}" in PAGE.read_text()


if __name__ == "__main__":
    print(surface(), end="")
