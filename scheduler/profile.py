"""Profiles of engines: what a simulation has in place of a model and a machine.

A profile is a JSON object: the costs of a step, and the settings, the layout and the pool that they belong to. Some
ship with Quire. `source` says whether costs were measured, and on what, or come from arithmetic.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.blueprint import Blueprint
from scheduler.step_costs import StepCosts

FORMAT, VERSION = "quire-profile", 1
SHIPPED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class Profile:
    """An engine that can be simulated.

    Attributes:
        name: For people.
        source: Where the costs come from.
        context: Tokens that prompt and output of a request may have together.
        costs: Of its steps.
        blueprint: Of its scheduler.
    """

    name: str
    source: str
    context: int
    costs: StepCosts
    blueprint: Blueprint

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits, by context and pool."""
        layout = self.blueprint.layout
        return min(self.context, layout.tokens_in(self.blueprint.pages, self.blueprint.settings.ahead))

    def to_json(self) -> dict[str, Any]:
        """Returns an object for `json`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "context": self.context,
            "costs": asdict(self.costs),
            "blueprint": self.blueprint.to_json(),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Profile":
        """Returns the profile of `to_json`. Raises ValueError for another object."""
        if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
            raise ValueError(f'is no profile: it has no "format": "{FORMAT}" with "version": {VERSION}')
        try:
            name, source, context = values["name"], values["source"], values["context"]
            costs, blueprint = StepCosts.from_json(values["costs"]), Blueprint.from_json(values["blueprint"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no profile of this version: {type(error).__name__}: {error}") from None
        if type(context) is not int or context < 2:
            raise ValueError(f"context is {context!r}, must be a number of tokens, at least 2")
        return Profile(str(name), str(source), context, costs, blueprint)


def shipped_profiles() -> tuple[str, ...]:
    """Returns the names of the profiles that ship with Quire."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def read_profile(source: str | Path) -> Profile:
    """Reads a profile.

    Args:
        source: Name of one that ships with Quire, or a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no profile. The message names it.
    """
    names = shipped_profiles()
    path = SHIPPED / f"{source}.json" if str(source) in names else Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{source} is neither a file nor one of the profiles {', '.join(names)}")
    try:
        return Profile.from_json(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:  # also what is no JSON, or no UTF-8
        raise ValueError(f"{path}: {error}") from None
