"""docs/reference/parameters.md, from the table of request parameters."""

from typing import Any

from docs.pages_of_code.tables import table, text
from scheduler.limits import ModelDefaults
from scheduler.parameter import Parameter
from scheduler.parameters import PARAMETERS

HEAD = """\
# Request parameters

Written by `make reference` from the table of parameters.

The first column is the field of the API, of a batch job's line, and of the Python classes `Sampling`, `Stopping` and
`Output`. The gateway and Open Inference use vLLM's name, but the gateway has no `detokenize`. `quire generate` and
`quire chat` have the flag. Numbers out of their range are refused on every way in.
[Sampling](../guides/sampling.md) says in which order the parameters apply. [The operator](../guides/security.md#limits)
bounds lengths and counts.
"""
KINDS = {float: "number", int: "integer", bool: "true or false"}
SILENT = ModelDefaults()


def page() -> str:
    """Returns the text of the page."""
    rows = [
        (f"`{entry.path}`", _code(entry.vllm), _code(entry.flag), _values(entry), _default(entry), entry.meaning)
        for entry in PARAMETERS
    ]
    return text([HEAD, *table(("parameter", "vLLM's name", "flag", "values", "default", "meaning"), rows)])


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def _values(entry: Parameter) -> str:
    if entry.item is not None:
        return {str: "texts", int: "token ids"}.get(entry.item, "token ids and numbers")
    kind = KINDS[entry.kind]
    return kind if entry.within is None else f"{kind}, {entry.within}"


def _default(entry: Parameter) -> str:
    if hasattr(SILENT, entry.name):
        return f"the model's, else {_shown(getattr(SILENT, entry.name))}"
    return _shown(entry.default if entry.neutral is None else entry.neutral)


def _shown(value: Any) -> str:
    return "" if value in (None, ()) else str(value).lower()
