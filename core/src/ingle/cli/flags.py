"""From a function with dataclass parameters to a function with one flag per dataclass field.

cyclopts reads the flattened signature and does the rest: parsing, help, environment, YAML.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse

SHORT_NAMES: Final[Mapping[str, str]] = {
    "quantization": "-q",
    "gpu_memory_utilization": "-gmu",
}
"""Short spellings, by field name, as vLLM and Aphrodite have them."""

POSITIONAL: Final = ("model",)
"""Fields that may also be given without their flag."""

_POSITIONAL_KIND: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD

CONFIG_HELP: Final = (
    "YAML file with any of these options, named as the flags are. Flags and environment win."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand, ready for cyclopts.

    Attributes:
        name: As typed after ``ingle``.
        summary: First line of the function's docstring.
        call: Takes the flags as keyword arguments, builds the dataclasses and calls the function.
        parameters: The flags, positional ones first.
    """

    name: str
    summary: str
    call: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]

    @property
    def flags(self) -> frozenset[str]:
        """Every long flag, in canonical spelling: ``--max-model-len``."""
        return frozenset(f"--{p.name.replace('_', '-')}" for p in self.parameters)

    @property
    def switches(self) -> frozenset[str]:
        """The long flags that take no value."""
        names = [p.name for p in self.parameters if _bare(p.annotation) is bool]
        return frozenset(f"--{name.replace('_', '-')}" for name in names)


def make_command(name: str, function: Callable[..., Any]) -> Command:
    """A command that runs ``function``; dataclass parameters are spread into flags."""
    spreads = _spreads(function)
    parameters = sorted([p for _, _, some in spreads for p in some], key=lambda p: p.kind.value)
    if any(cls is not None for _, cls, _ in spreads):
        parameters.append(_config_parameter())
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = dict(signature.bind(*args, **kwargs).arguments)
        return function(**{name: _collect(cls, some, values) for name, cls, some in spreads})

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = name.replace("-", "_")
    call.__doc__ = function.__doc__
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    return Command(name=name, summary=summary, call=call, parameters=tuple(parameters))


_Spread = tuple[str, type[Any] | None, tuple[inspect.Parameter, ...]]
"""A function's parameter, its dataclass (None: a plain parameter) and the flags it becomes."""


def _spreads(function: Callable[..., Any]) -> list[_Spread]:
    hints = get_type_hints(function, include_extras=True)
    spreads: list[_Spread] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, str)
        cls = _bare(hint)
        if dataclasses.is_dataclass(cls) and isinstance(cls, type):
            spreads.append((name, cls, tuple(_field_parameters(cls))))
        else:
            spreads.append((name, None, (parameter.replace(annotation=hint),)))
    return spreads


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _field_parameters(cls: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield inspect.Parameter(
            item.name,
            _POSITIONAL_KIND if item.name in POSITIONAL else inspect.Parameter.KEYWORD_ONLY,
            default=_default(item),
            annotation=Annotated[hints[item.name], _spelling(item.name, hints[item.name], cls)],
        )


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is dataclasses.MISSING else item.default


def _spelling(name: str, hint: Any, cls: type[Any]) -> Parameter:
    is_list = any(get_origin(part) in (tuple, list) for part in (hint, *get_args(hint)))
    return Parameter(
        help=attribute_docs(cls).get(name, ""),
        group=re.sub("(Config|Flags)$", "", cls.__name__),
        alias=SHORT_NAMES.get(name),
        consume_multiple=is_list,
        negative=() if is_list else None,
    )


def _config_parameter() -> inspect.Parameter:
    return inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, Parameter(help=CONFIG_HELP)],
    )


def _collect(
    cls: type[Any] | None, parameters: tuple[inspect.Parameter, ...], values: Mapping[str, Any]
) -> Any:
    given = {p.name: values.get(p.name, p.default) for p in parameters}
    return cls(**given) if cls is not None else next(iter(given.values()))


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """Help texts from the ``Attributes:`` section of a class docstring, on one line each."""
    documented = parse(inspect.getdoc(cls) or "").params
    return {
        entry.arg_name: " ".join((entry.description or "").split()).replace("``", "`")
        for entry in documented
    }
