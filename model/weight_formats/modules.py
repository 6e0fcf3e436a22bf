"""Names of linears: which of them a quantized checkpoint stores in its format, as writers' configs say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import CheckpointError, shown
from model.fields import Fields
from model.weight_formats.patterns import NamePattern

MOST_RULES = 256

_LAYER = re.compile(r"(?:^|\.)\d+\.")


def in_layer(name: str) -> bool:
    """Returns whether a linear is part of a numbered layer: output layers and projections of embeddings are not."""
    return _LAYER.search(name) is not None


def is_within(name: str, part: str) -> bool:
    """Returns whether a name has these components in a row: `model.layers.0.mlp.up_proj` has `mlp`, and `0.mlp`."""
    return f".{part.strip('.')}." in f".{name}."


def read_names(options: Fields, key: str) -> list[str]:
    """Returns a list of names, flat: some writers nest it. Raises CheckpointError."""
    names: list[Any] = []
    for one in options.get(key, list, []):
        names += one if isinstance(one, list) else [one]
    if not all(isinstance(name, str) for name in names):
        raise options.refuse(key, "must be a list of names")
    return names


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of 'dynamic'.

    Attributes:
        pattern: Pattern of the beginning of a linear's name.
        overrides: Options that differ for these linears. None where they are not quantized.
    """

    pattern: NamePattern
    overrides: dict[str, Any] | None


def read_rules(options: Fields) -> list[Rule]:
    """Reads 'dynamic' of GPTQModel: "-:REGEX" for linears that are plain, "+:REGEX" or "REGEX" for other options.

    Raises:
        CheckpointError: A rule is of another form, or its regex is not understood.
    """
    if options.values.get("dynamic") in (None, False):
        return []
    rules = options.get("dynamic", dict, {})
    if len(rules) > MOST_RULES:
        raise CheckpointError(f"{options.path}: 'dynamic' has {len(rules)} rules, may have {MOST_RULES}")
    return [_rule(options, text, overrides) for text, overrides in rules.items()]


def _rule(options: Fields, text: str, overrides: object) -> Rule:
    excluded, pattern = text.startswith("-:"), re.sub(r"^[-+]:", "", text)
    if not excluded and not isinstance(overrides, dict):
        raise CheckpointError(f"{options.path}: the rule {shown(text)} of 'dynamic' is {shown(overrides)}, no object")
    try:
        return Rule(NamePattern(pattern), None if excluded else overrides)  # type: ignore[arg-type]
    except ValueError as error:
        raise CheckpointError(
            f"{options.path}: the regex of the rule {shown(text)} of 'dynamic' is not served: {error}"
        ) from None


def rule_of(rules: Sequence[Rule], name: str) -> Rule | None:
    """Returns the first rule that matches a linear's name, None where none does."""
    return next((rule for rule in rules if rule.pattern.matches(name)), None)
