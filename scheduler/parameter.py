"""The form of an entry in the table of request parameters, which `scheduler.parameters` holds.

An entry is a field of a dataclass: its annotation is the type, its default holds where a client is silent, and its
metadata has what the ways in need beside these. They read the table with `parameters_of`, so a parameter that every way
in treats alike is one field there. Names of the API, of flags and of other packages are texts: this package imports
none of them.
"""

import math
from dataclasses import Field, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from scheduler.invalid import InvalidRequest

UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`; its text is what an error says.

    Attributes:
        above: `low` itself is out.
        below: `high` itself is out.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        over = self.low < value if self.above else self.low <= value  # NaN fails every comparison
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"finite and above {self.low}" if self.above else f"at least {self.low}"
        power = isinstance(self.high, int) and self.high > UINT32
        high = f"2^{int(self.high).bit_length() - 1}" if power else self.high
        return f"in {'(' if self.above else '['}{self.low}, {high}{')' if self.below else ']'}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """An entry of the table.

    Attributes:
        group: Field of `Spec`, and of the API's GenerationSpec, that holds it.
        name: Its field in that group.
        kind: float, int, bool, or the type of several such as tuple[str, ...]; of an optional one without None.
        item: Type of one of several values; None where there is one value.
        default: Its value where a client is silent. None: the model's default, else `neutral`.
        within: The allowed numbers. None: any, or code of its own checks them.
        note: Words behind the interval in an error.
        neutral: The value that changes nothing: all that a beam search takes. The default where an entry names none.
        control: Field of `Controls`, or of its `LogitsParams`, that gets its value.
        vllm: vLLM's name, which OpenAI's API has where it has the parameter, and Open Inference. Empty: they have none.
        off: vLLM's second way to write `neutral`.
        flag: Flag of `quire generate` and `quire chat`. Empty: they have none.
        meaning: The help of its flag, and its line in the reference.
    """

    group: str
    name: str
    kind: Any
    item: Any
    default: Any
    within: Interval | None = None
    note: str = ""
    neutral: Any = None
    control: str = ""
    vllm: str = ""
    off: int | None = None
    flag: str = ""
    meaning: str = ""

    @property
    def path(self) -> str:
        """Name in errors: the path from the API's GenerationSpec."""
        return f"{self.group}.{self.name}"

    @property
    def range(self) -> tuple[int, int]:
        """Least and most of a whole number that the API can carry and that is allowed."""
        if self.within is None:
            return 0, UINT32
        high = UINT32 if self.within.high == math.inf else int(self.within.high) - self.within.below
        return int(self.within.low) + self.within.above, high

    def check(self, value: Any) -> None:
        """Raises InvalidRequest for a value out of its range."""
        unset = value is None and self.default is None
        if self.within is not None and not unset and value not in self.within:
            raise InvalidRequest(self.path, value, f"must be {self.within}{self.note and f', {self.note}'}")

    def read(self, value: Any) -> Any:
        """Returns the value that a client of vLLM means."""
        return self.neutral if self.off is not None and value == self.off else value


def parameter(
    default: Any,
    *,
    within: Interval | None = None,
    note: str = "",
    neutral: Any = None,
    control: str = "",
    vllm: str | None = None,
    off: int | None = None,
    flag: str = "",
    meaning: str = "",
) -> Any:
    """Makes the field of an entry, whose arguments are those of `Parameter`. vllm: None is the field's own name."""
    about = {
        "within": within, "note": note, "neutral": neutral, "control": control, "vllm": vllm, "off": off, "flag": flag,
        "meaning": meaning,
    }  # fmt: skip
    return field(default=default, metadata=about)


@cache
def parameters_of(group: type) -> tuple[Parameter, ...]:
    """Returns the entries of a dataclass, in order. The group has the class's name in small letters."""
    return tuple(_entry(group.__name__.lower(), one) for one in fields(group) if one.metadata)


def _entry(group: str, one: Field[Any]) -> Parameter:
    about = dict(one.metadata)
    kinds = get_args(one.type)
    kind = next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else one.type
    if about["vllm"] is None:
        about["vllm"] = one.name
    if about["neutral"] is None:
        about["neutral"] = one.default
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    return Parameter(group, one.name, kind, item, one.default, **about)


def check_ranges(group: object) -> None:
    """Raises InvalidRequest for the first value of a dataclass of parameters that is out of its range."""
    kind: type = type(group)
    for entry in parameters_of(kind):
        entry.check(getattr(group, entry.name))
