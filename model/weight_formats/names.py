"""Lists of linears in 'quantization_config': names, and patterns.

Python's patterns can take exponential time. They come from untrusted files, so those that could are refused.
"""

import re
from collections.abc import Iterator, Sequence

from model.errors import CheckpointError, shown
from model.fields import Fields

MOST_NAMES = 100_000
LONGEST_PATTERN = 500
MOST_REPEATS = 5  # of a pattern: a name of n characters takes at most about n ** 5 / 120 steps
MOST_PATTERNS = 256
PATTERN = "re:"

_REPEATED_GROUP = re.compile(r"\)[*+{]")
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
        if len(patterns) > MOST_PATTERNS:
            raise CheckpointError(f"{fields.path}: {key!r} has {len(patterns)} patterns, may have {MOST_PATTERNS}")
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
        for name in starred:
            if name.count("*") > MOST_REPEATS or len(name) > LONGEST_PATTERN:
                raise CheckpointError(f"{fields.path}: {keys[0]!r} has {shown(name)}, may have {MOST_REPEATS} stars")
        if len(starred) > MOST_PATTERNS:
            raise CheckpointError(f"{fields.path}: {keys[0]!r} has {len(starred)} names with stars, may have "
                                  f"{MOST_PATTERNS}")  # fmt: skip
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


def _compiled(fields: Fields, key: str, pattern: str) -> re.Pattern[str]:
    """Compiles a pattern whose matching takes bounded time. Raises CheckpointError for another one."""
    where = f"{fields.path}: {key!r} has the pattern {shown(pattern)}"
    if len(pattern) > LONGEST_PATTERN:
        raise CheckpointError(f"{where} of {len(pattern)} characters, may have {LONGEST_PATTERN}")
    if _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MOST_REPEATS:
        raise CheckpointError(f"{where}, which may have {MOST_REPEATS} of * + ? {{ and no * + {{ behind a group")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}, which is no regular expression: {error}") from None
