"""docs/reference/configuration.md, from the flags of the commands that read a file and the environment."""

from typing import Any

from docs.pages_of_code.commands import commands, default_of, options, value_of
from docs.pages_of_code.tables import table, text
from rpc.cli.defaults import ENVIRONMENT

HEAD = """\
# Configuration

Written by `make reference` from the commands.

A flag of these commands can stand in three places: {commands}. The command line beats the file, the file beats the
environment.

1. On the command line: `--page-size 16`.
2. In a TOML file, `--config quire.toml`, under the flag's name without dashes in front. A file for several commands
   has a table for each. A key that is no flag of the command is refused, with the names that are spelt alike.
3. In the environment, in capitals after `QUIRE_`. One environment serves all commands: an unknown name is no error,
   and a name that resembles a flag's is reported.

```toml
port = 50051
max-batched-tokens = 512

[frontend]
port = 50061
```

The table has every setting by its name in a file. [Command line](command-line.md) says what each one does.
"""
OFF = ("config",)


def page() -> str:
    """Returns the text of the page."""
    read = {name: command for name, command in commands() if any(p.name == "config" for p in command.params)}
    settings: dict[str, dict[str, Any]] = {}
    for name, command in read.items():
        for option in options(command):
            if option.name not in OFF:
                settings.setdefault(option.name, {})[name] = option
    rows = [
        (
            f"`{name.replace('_', '-')}`",
            f"`{ENVIRONMENT}{name.upper()}`",
            value_of(next(iter(by.values()))) or "true or false",
            _defaults(by),
            ", ".join(by),
        )
        for name, by in sorted(settings.items())
    ]
    listed = ", ".join(f"`{name}`" for name in read)
    head = HEAD.format(commands=listed)
    return text([head, *table(("in a file", "in the environment", "value", "default", "of"), rows)])


def _defaults(by: dict[str, Any]) -> str:
    """Returns the default of a setting; where commands differ, that of each."""
    found = {name: default_of(option) for name, option in by.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{name}: {default or 'none'}" for name, default in found.items())
