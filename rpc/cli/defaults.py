"""Defaults of flags from a file and from the environment.

The command line takes precedence over the file, and the file over the environment.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

ENVIRONMENT = "QUIRE_"
NOT_SETTINGS = {"config", "help"}
ALIKE = 0.75  # difflib's ratio from which a name is suggested for another
SUGGESTIONS = 3


def on_command_line(context: typer.Context, flags: Iterable[str]) -> list[str]:
    """Returns those flags, by the names of their parameters, that neither a file nor the environment has given."""
    sources = {flag: context.get_parameter_source(flag) for flag in flags}
    return [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@dataclass(frozen=True, slots=True)
class Flags:
    """Names of flags, as Python parameters.

    Attributes:
        command: The command that runs.
        own: Flag of this command, to whether it is a switch.
        others: Other command, to its flags.
        configured: Commands that read a file and the environment.
    """

    command: str
    own: Mapping[str, bool]
    others: Mapping[str, frozenset[str]]
    configured: frozenset[str]

    @staticmethod
    def of_command(context: typer.Context) -> "Flags":
        commands: dict[str, Any] = getattr(context.find_root().command, "commands", {})
        flags = {name: frozenset(p.name for p in command.params if p.name) for name, command in commands.items()}
        command = context.command.name or ""
        return Flags(
            command,
            {
                p.name: bool(getattr(p, "is_flag", False))
                for p in context.command.params
                if p.name and p.name not in NOT_SETTINGS
            },
            {name: found - NOT_SETTINGS for name, found in flags.items() if name != command},
            frozenset(name for name, found in flags.items() if "config" in found),
        )

    def hint(self, name: str) -> str:
        """Returns a hint at the flags that an unknown name may stand for; "" if none is likely."""
        found = likely(_spelt(name), [_spelt(own) for own in self.own])
        having = [command for command, flags in self.others.items() if name in flags]
        hints = [
            *([f"did you mean {' or '.join(found)}?"] if found else []),
            *([f"it is a flag of {', '.join(having)}"] if having else []),
        ]
        return " ".join(hints)


def likely(name: str, known: list[str]) -> list[str]:
    """Returns known names that this one may stand for: similar spellings first, then names with all its words."""
    words = set(name.split("-"))
    longer = [one for one in known if words <= set(one.split("-"))]
    return list(dict.fromkeys(difflib.get_close_matches(name, known, SUGGESTIONS, ALIKE) + longer))[:SUGGESTIONS]


def load_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Sets the command's defaults from the environment and, over them, the file; the callback of --config."""
    flags = Flags.of_command(context)
    values = _from_environment(flags) | ({} if path is None else _from_file(path, flags))
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _from_environment(flags: Flags) -> dict[str, Any]:
    """Reads the command's flags, and warns of unknown names that resemble one.

    No name is an error: one environment serves all commands, and other tools may use names with the same prefix.
    """
    elsewhere = set[str]().union(*(flags.others[name] for name in flags.configured - {flags.command}))
    values = dict[str, Any]()
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENVIRONMENT).lower()
        if not variable.startswith(ENVIRONMENT):
            continue
        if name in flags.own:
            values[name] = value
        elif name not in elsewhere and (hint := flags.hint(name)):
            typer.echo(f"quire: {variable} in the environment is ignored: {hint}", err=True)
    return values


def _from_file(path: Path, flags: Flags) -> dict[str, Any]:
    """Reads the keys at the top, and over them those of the command's own table. Raises typer.BadParameter."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    for name in tables.keys() - flags.configured:
        raise typer.BadParameter(
            f"{path}: [{name}] is no command that reads a file: {', '.join(sorted(flags.configured))}"
        )
    top = {key: value for key, value in content.items() if key not in tables}
    return _checked(path, top, flags) | _checked(path, tables.get(flags.command, {}), flags)


def _checked(path: Path, content: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """Checks keys and types, and returns the values by parameter. Raises typer.BadParameter."""
    values = dict[str, Any]()
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in flags.own:
            hint = flags.hint(name) or f"`quire {flags.command} --help` lists its flags"
            raise typer.BadParameter(f"{path}: {key!r} is no flag of quire {flags.command}: {hint}")
        if name in values:
            raise typer.BadParameter(f"{path}: {key!r} is given twice")
        if not isinstance(value, str | int | float) or isinstance(value, bool) != flags.own[name]:
            raise typer.BadParameter(f"{path}: {key} = {value!r} is of the wrong type")
        values[name] = value
    return values


def _spelt(name: str) -> str:
    """Returns a parameter's name as it stands in a file and on the command line."""
    return name.replace("_", "-")
