"""Lists of linears in 'quantization_config': names, and patterns.

Python's patterns can take exponential time. They come from untrusted files, so those that could are refused.
"""

import re
from collections.abc import Iterator, Sequence
from math import comb, prod

from model.errors import CheckpointError, shown
from model.fields import Fields

MOST_NAMES = 100_000
LONGEST_PATTERN = 500
MOST_PATTERNS = 256
MOST_STEPS = 4_000_000  # for all patterns of a list and one name: 40 ms
NAME = 64  # characters that a name may have, about
PATTERN = "re:"

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_NUMBER = re.compile(r"(?:\\d|\[0-9\])[*+]")  # names have a few digits, each number behind a dot
_REPEAT = re.compile(r"(?<!\\)(?:[*+{]|(?<!\()\?)")


def read_names(fields: Fields, key: str) -> list[str]:
    """Returns a list of names, empty where there is none. Raises CheckpointError."""
    names = fields.get(key, list, [])
    if len(names) > MOST_NAMES or not all(isinstance(name, str) for name in names):
        raise fields.refuse(key, f"must be a list of at most {MOST_NAMES} names")
    return names


class NameList:
    """Names of linears, and patterns of the beginnings of names: compressed-tensors' `targets` and `ignore`."""

    def __init__(self, fields: Fields, key: str) -> None:
        """Reads a list. Raises CheckpointError."""
        names = read_names(fields, key)
        self._exact = frozenset(name for name in names if not name.startswith(PATTERN))
        patterns = [name.removeprefix(PATTERN) for name in names if name.startswith(PATTERN)]
        _check_patterns(fields, key, patterns)
        self._patterns = [_compiled(fields, key, pattern) for pattern in patterns]

    def names(self, word: str) -> bool:
        """Whether this very word is in the list, as the name of a class is."""
        return word in self._exact

    def __contains__(self, name: str) -> bool:
        return any(
            one in self._exact or any(pattern.match(one) for pattern in self._patterns) for one in _aliases(name)
        )

    def __iter__(self) -> Iterator[str]:
        """Yields the names that are no patterns."""
        return iter(self._exact)


class ModuleList:
    """Names of modules, or ends of them: transformers' `modules_to_not_convert`. A star stands for any characters."""

    def __init__(self, fields: Fields, keys: Sequence[str]) -> None:
        """Reads the lists under these keys. Raises CheckpointError."""
        names = {name for key in keys for name in read_names(fields, key)}
        starred = [name for name in names if "*" in name]
        _check_patterns(fields, keys[0], starred)
        self._exact = names
        self._patterns = [re.compile(".*".join(map(re.escape, name.split("*")))) for name in starred]

    def __contains__(self, name: str) -> bool:
        return any(self._has(one) for one in _aliases(name))

    def _has(self, name: str) -> bool:
        """Whether the module, one that it lies in, or the end of either's name is in the list."""
        words = name.split(".")
        for stop in range(1, len(words) + 1):
            if any(".".join(words[start:stop]) in self._exact for start in range(stop)):
                return True
            whole = ".".join(words[:stop])
            if any(pattern.fullmatch(whole) for pattern in self._patterns):
                return True
        return False


def _aliases(name: str) -> tuple[str, ...]:
    """Returns the names that a linear of a text model has in it, and in vision-language models."""
    inner = name.removeprefix("model.")
    return (name, f"language_model.{name}", f"model.language_model.{inner}", f"model.text_model.{inner}")


def _check_patterns(fields: Fields, key: str, patterns: Sequence[str]) -> None:
    """Raises CheckpointError for patterns that together could take long to match."""
    if len(patterns) > MOST_PATTERNS:
        raise CheckpointError(f"{fields.path}: {key!r} has {len(patterns)} patterns, may have {MOST_PATTERNS}")
    steps = 0
    for pattern in patterns:
        where = f"{fields.path}: {key!r} has the pattern {shown(pattern)}"
        if len(pattern) > LONGEST_PATTERN:
            raise CheckpointError(f"{where} of {len(pattern)} characters, may have {LONGEST_PATTERN}")
        if _REPEATED_GROUP.search(pattern):
            raise CheckpointError(f"{where}, which may have no * + {{ behind a group: matching could take forever")
        steps += _steps(pattern)
        if steps > MOST_STEPS:
            raise CheckpointError(
                f"{where}, one of {len(patterns)}: matching could take {steps} steps, may take {MOST_STEPS}; name the "
                "linears, or use fewer * + ? and |"
            )


def _steps(pattern: str) -> int:
    """Returns about how many ways there are to match a name, at most."""
    if "(" not in pattern and "|" in pattern:
        return sum(map(_steps, pattern.split("|")))
    # Each repeat takes any number of characters: the ways to share a name among them. Each group has one alternative.
    repeats = len(_REPEAT.findall(_NUMBER.sub("", pattern)))
    return comb(NAME + repeats, repeats) * prod(part.count("|") + 1 for part in pattern.split(")"))


def _compiled(fields: Fields, key: str, pattern: str) -> re.Pattern[str]:
    """Compiles a pattern. Raises CheckpointError where it is none."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        where = f"{fields.path}: {key!r} has the pattern {shown(pattern)}"
        raise CheckpointError(f"{where}, which is no regular expression: {error}") from None
