"""The commands of `quire`, and their flags, as Typer knows them."""

from collections.abc import Iterator
from typing import Any, get_args

import typer

from rpc.cli.main import app

LEFT_OUT = {"help"}


def commands() -> Iterator[tuple[str, Any]]:
    """Yields each command that runs something, with its words: `admin drain`."""
    yield from _below("", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, one in inner.items():
        yield from _below(f"{name} {word}".strip(), one)


def options(command: Any) -> list[Any]:
    """Returns the flags of a command, in the order of its help."""
    return [p for p in command.params if p.param_type_name == "option" and p.name not in LEFT_OUT and not p.hidden]


def arguments(command: Any) -> list[Any]:
    """Returns what a command takes without a flag."""
    return [p for p in command.params if p.param_type_name == "argument"]


def value_of(option: Any) -> str:
    """Names the kind of value that a flag takes; "" for a switch."""
    if option.is_flag:
        return ""
    if option.metavar:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    names = {"str": "text", "int": "integer", "float": "number", "Path": "file"}
    name = getattr(kinds[0], "__name__", "text")
    return names.get(name, name)


def default_of(option: Any) -> str:
    """Returns the default as it stands on a command line; "" where the help says what happens without one."""
    if option.default is None or option.default in ((), []):
        return ""
    if option.is_flag:
        return "on" if option.default else "off"
    return f"`{option.default}`"
