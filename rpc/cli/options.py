"""Makes command-line flags of settings dataclasses, and the dataclasses of the flags' values."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from rpc.cli.defaults import load_defaults

S = TypeVar("S")

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(value: str | int) -> int:
    """Returns the bytes of "512MiB", "2G" or "1073741824". Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{value!r} is no size: write 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def flag_of(setting: Field[Any]) -> str:
    """Returns the flag of a field: its own, or its name with dashes."""
    flag: str = setting.metadata.get("flag", "--" + setting.name.replace("_", "-"))
    return flag


def parameter_of(setting: Field[Any]) -> str:
    """Returns the flag's name as a Python parameter."""
    return flag_of(setting).removeprefix("--").replace("-", "_")


def with_settings(panels: Mapping[type, str | None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one flag for each field of some dataclasses.

    The command is called with the flags' values by parameter name; `build` makes the dataclasses of them.

    Args:
        panels: Dataclass, and the title of its panel in --help; None is the main panel.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [
            _parameter(s, get_type_hints(kind)[s.name], panel) for kind, panel in panels.items() for s in fields(kind)
        ]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=p.KEYWORD_ONLY) for p in [*made, *own]]
        )
        return command

    return decorate


def _parameter(setting: Field[Any], kind: Any, panel: str | None) -> inspect.Parameter:
    size = setting.metadata.get("size", False)
    flag = flag_of(setting)
    on_by_default = kind is bool and setting.default is True
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if on_by_default else flag,
        help=setting.metadata["help"],
        rich_help_panel=panel,
        show_default=setting.default is not None and kind is not bool,
        parser=parse_size if size else None,
        metavar="SIZE" if size else None,
        min=setting.metadata.get("min"),
        max=setting.metadata.get("max"),
    )
    return inspect.Parameter(
        parameter_of(setting),
        inspect.Parameter.KEYWORD_ONLY,
        default=setting.default,
        annotation=Annotated[kind, option],
    )


def build(kind: type[S], values: Mapping[str, Any]) -> S:
    """Makes a dataclass of a command's values. Raises the dataclass's ValueError."""
    return kind(**{setting.name: values[parameter_of(setting)] for setting in fields(kind)})  # type: ignore[arg-type]


Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML file of this command's flags: `port = 50051`, `max-batched-tokens = 512`. A table with the "
        "name of a command, such as serve, is for that command alone. The command line takes precedence.",
        callback=load_defaults,
        is_eager=True,
        show_default=False,
    ),
]
