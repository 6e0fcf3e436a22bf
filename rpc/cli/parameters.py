"""Flags of request parameters, from the table of parameters. The server decides those that are unset."""

from dataclasses import field, make_dataclass
from typing import Any

from scheduler.parameter import Parameter, parameters_of
from scheduler.parameters import Sampling, Stopping


def _options(group: type) -> type:
    """Returns a dataclass of settings with the group's flags."""
    entries = [entry for entry in parameters_of(group) if entry.flag]
    made = [(entry.name, _type(entry) | None, field(default=None, metadata=_about(entry))) for entry in entries]
    return make_dataclass(f"{group.__name__}Options", made, frozen=True, slots=True)


def _type(entry: Parameter) -> Any:
    return entry.kind if entry.item is None else list[entry.item]  # type: ignore[name-defined]


def _about(entry: Parameter) -> dict[str, object]:
    about: dict[str, object] = {"flag": entry.flag, "help": entry.meaning}
    if entry.kind is int:
        about["min"], about["max"] = entry.range
    return about


SamplingOptions, StoppingOptions = _options(Sampling), _options(Stopping)
