"""Regexes of a checkpoint's config: matched in polynomial time, since the file may come from anyone.

`re` takes exponential time for patterns as `(a+)+$`. Here each part of a pattern maps the set of places where it may
begin to the set of places where it may end (Thompson, 1968), which needs no backtracking.
"""

import re
from collections.abc import Callable, Iterable

LONGEST = 500  # characters of a pattern
DEEPEST = 4  # groups within each other
MOST_TIMES = 1000  # of {m,n}

Places = frozenset[int]
Step = Callable[[str, Places], Places]

_NOWHERE: Places = frozenset()
_TOKEN = re.compile(
    r"""(?P<open>\(\?:|\(\?=|\(\?!|\((?!\?))
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})\??)
    |(?P<edge>[\^$])
    |(?P<character>\[\^?\]?(?:\\[\W_dDsSwW]|[^\[\]\\])*\]|\\(?:[\W_]|[dDsSwW])|[^\\\[(){}?*+|^$])
    """,
    re.VERBOSE | re.DOTALL,
)


class NamePattern:
    """A pattern that the beginning of a name may match, as `re.match`.

    Characters, classes, groups, alternatives, repetitions, `^`, `$`, `(?=` and `(?!` are understood.
    """

    def __init__(self, pattern: str) -> None:
        """Reads the pattern. Raises ValueError for one that is not understood, or too long or deep."""
        if len(pattern) > LONGEST:
            raise ValueError(f"it has {len(pattern)} characters, may have {LONGEST}")
        self._step = _Reader(pattern).read()

    def matches(self, name: str) -> bool:
        return bool(self._step(name, frozenset((0,))))


class _Reader:
    """Reads a pattern by recursive descent."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._depth = pattern, 0, 0
        self._kind, self._text = "", ""
        self._next()

    def read(self) -> Step:
        step = self._alternatives()
        if self._kind:
            raise ValueError(f"{self._text!r} before character {self._at + 1} closes nothing")
        return step

    def _next(self) -> None:
        """Goes to the next token; its kind is empty at the end."""
        if self._at == len(self._pattern):
            self._kind = self._text = ""
            return
        found = _TOKEN.match(self._pattern, self._at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"character {self._at + 1} is not understood")
        self._kind, self._text, self._at = found.lastgroup, found[0], found.end()

    def _alternatives(self) -> Step:
        steps = [self._sequence()]
        while self._kind == "bar":
            self._next()
            steps.append(self._sequence())
        return steps[0] if len(steps) == 1 else _any_of(steps)

    def _sequence(self) -> Step:
        steps = []
        while self._kind not in ("", "bar", "close"):
            step = self._one()
            while self._kind == "times":
                step = _repeated(step, *_times(self._text))
                self._next()
            steps.append(step)
        return _one_by_one(steps)

    def _one(self) -> Step:
        kind, text = self._kind, self._text
        if kind == "times":
            raise ValueError(f"{text!r} before character {self._at + 1} repeats nothing")
        self._next()
        if kind == "character":
            return _character(text)
        if kind == "edge":
            return _at_end if text == "$" else _at_start
        return self._group(text)

    def _group(self, opened: str) -> Step:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} groups within each other")
        step = self._alternatives()
        if self._kind != "close":
            raise ValueError(f"a group is not closed at character {self._at + 1}")
        self._next()
        self._depth -= 1
        return _ahead(step, opened == "(?=") if opened in ("(?=", "(?!") else step


def _times(text: str) -> tuple[int, int | None]:
    """Returns the fewest and the most times that a quantifier stands for; None for any number."""
    if text[0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text[0]]
    low, comma, high = text.strip("{}?").partition(",")
    least = int(low[: len(str(MOST_TIMES)) + 1])
    most = int(high[: len(str(MOST_TIMES)) + 1]) if high else None if comma else least
    if max(least, most or 0) > MOST_TIMES or (most is not None and most < least):
        raise ValueError(f"{text!r} repeats more than {MOST_TIMES} times, or never")
    return least, most


def _character(text: str) -> Step:
    try:
        one = re.compile(text, re.DOTALL)
    except re.error as error:
        raise ValueError(str(error)) from None
    return lambda name, places: frozenset(
        place + 1 for place in places if place < len(name) and one.match(name[place]) is not None
    )


def _at_start(_: str, places: Places) -> Places:
    return places & {0}


def _at_end(name: str, places: Places) -> Places:
    return places & {len(name)}


def _any_of(steps: Iterable[Step]) -> Step:
    return lambda name, places: frozenset().union(*(step(name, places) for step in steps))


def _one_by_one(steps: Iterable[Step]) -> Step:
    def run(name: str, places: Places) -> Places:
        for step in steps:
            if not places:
                break
            places = step(name, places)
        return places

    return run


def _ahead(step: Step, wanted: bool) -> Step:
    return lambda name, places: frozenset(place for place in places if bool(step(name, frozenset((place,)))) is wanted)


def _repeated(step: Step, least: int, most: int | None) -> Step:
    def run(name: str, places: Places) -> Places:
        for _ in range(least):
            places = step(name, places)
            if not places:
                return _NOWHERE
        found = places
        times = least
        while places and (most is None or times < most):
            places = step(name, places) - found  # a place that is known is reached with fewer repetitions
            found |= places
            times += 1
        return found

    return run
