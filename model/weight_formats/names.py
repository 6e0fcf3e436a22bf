"""Lists of linears in 'quantization_config': names, and patterns."""

import re
from collections.abc import Iterable, Iterator, Sequence

from model.errors import CheckpointError, shown
from model.fields import Fields
from model.weight_formats.modules import read_names
from model.weight_formats.patterns import NamePattern

MOST_PATTERNS = 256
PATTERN = "re:"


class NameList:
    """Names of linears, and patterns of the beginnings of names: compressed-tensors' `targets` and `ignore`."""

    def __init__(self, fields: Fields, key: str) -> None:
        """Reads a list. Raises CheckpointError."""
        names = read_names(fields, key)
        self._exact = frozenset(name for name in names if not name.startswith(PATTERN))
        self._aliased = _has_aliases(names)
        patterns = [name.removeprefix(PATTERN) for name in names if name.startswith(PATTERN)]
        self._patterns = _read_patterns(fields, key, patterns)

    def names(self, word: str) -> bool:
        """Whether this very word is in the list, as the name of a class is."""
        return word in self._exact

    def __contains__(self, name: str) -> bool:
        return any(
            one in self._exact or any(pattern.matches(one) for pattern in self._patterns)
            for one in _aliases(name, self._aliased)
        )

    def __iter__(self) -> Iterator[str]:
        """Yields the names that are no patterns."""
        return iter(self._exact)


class ModuleList:
    """Names of modules, or ends of them: transformers' `modules_to_not_convert`. A star stands for any characters."""

    def __init__(self, fields: Fields, keys: Sequence[str]) -> None:
        """Reads the lists under these keys. Raises CheckpointError."""
        names = {name for key in keys for name in read_names(fields, key)}
        self._exact, self._aliased = names, _has_aliases(names)
        starred = [".*".join(map(re.escape, name.split("*"))) + r"(\.|$)" for name in names if "*" in name]
        self._patterns = _read_patterns(fields, keys[0], starred)

    def __contains__(self, name: str) -> bool:
        return any(self._has(one) for one in _aliases(name, self._aliased))

    def _has(self, name: str) -> bool:
        """Whether the module, one that it lies in, or the end of either's name is in the list."""
        words = name.split(".")
        places = [(start, stop) for stop in range(1, len(words) + 1) for start in range(stop)]
        if any(".".join(words[start:stop]) in self._exact for start, stop in places):
            return True
        return any(pattern.matches(name) for pattern in self._patterns)


def _has_aliases(names: Iterable[str]) -> bool:
    """Whether a list is of a vision-language model: matching a name costs 0.1 ms for each of its aliases."""
    return any(part in name for name in names for part in ("language_model", "text_model"))


def _aliases(name: str, aliased: bool) -> tuple[str, ...]:
    """Returns the names that a linear of a text model has in it and, where aliased, in vision-language models."""
    if not aliased:
        return (name,)
    inner = name.removeprefix("model.")
    return (name, f"language_model.{name}", f"model.language_model.{inner}", f"model.text_model.{inner}")


def _read_patterns(fields: Fields, key: str, patterns: Sequence[str]) -> list[NamePattern]:
    """Raises CheckpointError for patterns that are not understood, or too many."""
    if len(patterns) > MOST_PATTERNS:
        raise CheckpointError(f"{fields.path}: {key!r} has {len(patterns)} patterns, may have {MOST_PATTERNS}")
    made = []
    for pattern in patterns:
        try:
            made.append(NamePattern(pattern))
        except ValueError as error:
            where = f"{fields.path}: {key!r} has the pattern {shown(pattern)}"
            raise CheckpointError(f"{where}, which is not served: {error}") from None
    return made
