"""docs/reference/command-line.md, from the commands' own help."""

from collections.abc import Iterator
from typing import Any

from docs.pages_of_code.commands import arguments, commands, default_of, options, value_of
from docs.pages_of_code.tables import table, text

HEAD = """\
# Command line

Written by `make reference` from the commands. `quire COMMAND --help` shows the same on a terminal. A SIZE is a number
of bytes, or a text such as `512MiB`. [Configuration](configuration.md) says how flags stand in a file or in the
environment.
"""
OTHER = "Other"


def page() -> str:
    """Returns the text of the page."""
    return text([HEAD, *(line for name, command in commands() for line in _section(name, command))])


def _section(name: str, command: Any) -> Iterator[str]:
    takes = " ".join(_argument(one) for one in arguments(command))
    yield from (f"## quire {name}", "", f"`{f'quire {name} {takes}'.strip()} [FLAGS]`", "")
    yield from (" ".join(_prose(command.help).split()), "")
    yield from table(
        ("flag", "value", "default", ""),
        [(_flag(one), value_of(one), default_of(one), _prose(one.help or "")) for one in options(command)],
    )


def _argument(argument: Any) -> str:
    name = str(argument.metavar or argument.name).strip("[]").upper()
    return name if argument.required else f"[{name}]"


def _flag(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _prose(help_text: str) -> str:
    """Returns the help as one line, in which Markdown sees no HTML."""
    return " ".join(help_text.split()).replace("<", "&lt;")
