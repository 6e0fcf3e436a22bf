r"""Regular expressions as rules of XGrammar, which mean the same.

XGrammar's own reader of them ignores anchors in the middle, reads `\A` as a letter, and takes the opposite of the ASCII
digits for that of all digits. In a pattern of a schema it takes a quote for one of JSON, and reads `(x[0-9]+)?` as
`(x[0-9]+)?[0-9]*`. So an expression is parsed here, and written in literals, classes of characters, groups and
repetitions. What has no such form is refused by name. Where a class has letters beyond ASCII, a narrower one takes its
place, never a wider one.
"""

import string
from dataclasses import dataclass

from model.inputs.grammars import GrammarRefused

Ranges = tuple[tuple[int, int], ...]
"""Characters of a class: first and last code point of each range, ascending, none adjoining."""

LAST, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
ASCII: Ranges = ((1, 0x7F),)
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACES: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
"""White space of Rust, and of Python without U+001C to U+001F. That of ECMA-262 has U+FEFF, and not U+0085."""
NAMED = {"d": DIGITS, "w": WORD}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
CODES = {"x": 2, "u": 4, "U": 8}  # digits of a character's code behind its escape
MOST_REPEATED = 1000
MOST_WRITTEN = 2**16  # characters of an expression as it is written


def union(*parts: Ranges) -> Ranges:
    """Returns the characters of any of some classes."""
    merged = list[tuple[int, int]]()
    for first, last in sorted(one for part in parts for one in part):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters: no surrogate, which is none, and no NUL, which XGrammar's own form loses."""
    taken = union(ranges, (SURROGATES, (0, 0)))
    begins = [0, *(last + 1 for _, last in taken)]
    ends = [*(first - 1 for first, _ in taken), LAST]
    return tuple((first, last) for first, last in zip(begins, ends, strict=True) if first <= last)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Returns the characters of both classes."""
    return complement(union(complement(one), complement(other)))


ANY = complement(())
NO_NEW_LINE = complement(((0x0A, 0x0A),))
LETTERS = frozenset(string.ascii_letters + string.digits)
IN_JSON = complement(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
"""Characters that a text in JSON has without an escape."""
SURE_SPACES, POSSIBLE_SPACES = common(SPACES, complement(((0x85, 0x85),))), union(SPACES, ((0xFEFF, 0xFEFF),))
"""White space of all dialects, and of any, among the characters of IN_JSON.

A schema's pattern is ECMA-262's, and many clients check it with Python.
"""


@dataclass(frozen=True, slots=True)
class Branch:
    """An alternative of a whole expression: its text, and whether it has the first and the last anchor."""

    text: str
    begins: bool
    ends: bool


def whole(expression: str) -> str:
    """Returns the right side of a rule for the texts that an expression matches as a whole.

    Raises:
        GrammarRefused: It has what has no form here.
    """
    return " | ".join(branch.text for branch in _Rewriter(expression, ANY, SPACES, SPACES).read())


def within_json(expression: str) -> str:
    """Returns the right side of a rule for texts of JSON, between their quotes, in which an expression matches.

    Texts that need an escape are none of them.

    Raises:
        GrammarRefused: It has what has no form here, or a character that needs an escape.
    """
    around = f"{written(IN_JSON)}*"
    branches = _Rewriter(expression, IN_JSON, SURE_SPACES, POSSIBLE_SPACES).read()
    return " | ".join(f"{'' if b.begins else around} {b.text} {'' if b.ends else around}".strip() for b in branches)


def of_length(least: int, most: int | None) -> str:
    """Returns the right side of a rule for texts of JSON with so many characters, none of which needs an escape.

    It is an expression for the library, whose masks are quick then. The library reads one without alternatives rightly,
    but makes a state for each character.
    """
    if max(least, most or 0) > MOST_REPEATED:
        return f"{written(IN_JSON)}{{{least},{'' if most is None else most}}}"
    ends = [_char(chr(code)) if chr(code) not in "[]" else f"\\\\{chr(code)}" for pair in IN_JSON for code in pair]
    inner = "".join(f"{first}-{last}" for first, last in zip(ends[::2], ends[1::2], strict=True))
    return f'Regex("[{inner}]{{{least},{"" if most is None else most}}}", json_string=true)'


def quoted(text: str) -> str:
    """Returns the literal of a text."""
    return '"' + "".join(map(_char, text)) + '"'


def written(ranges: Ranges) -> str:
    """Returns the class of characters, or the literal of a single one."""
    (first, last), *others = ranges
    if first == last and not others:
        return quoted(chr(first))
    return "[" + "".join(_char(chr(a)) + (f"-{_char(chr(b))}" if a < b else "") for a, b in ranges) + "]"


def _char(char: str) -> str:
    return char if char in LETTERS else f"\\U{ord(char):08x}"


class _Rewriter:
    """Reads one expression, and writes it anew."""

    def __init__(self, text: str, allowed: Ranges, spaces: Ranges, possible_spaces: Ranges) -> None:
        r"""Makes a reader.

        Args:
            text: The expression.
            allowed: Characters that a text may have.
            spaces: Characters that \s matches.
            possible_spaces: Characters that \S does not match.
        """
        self._text, self._allowed, self._at = text, allowed, 0
        self._spaces, self._possible_spaces = spaces, possible_spaces

    def read(self) -> list[Branch]:
        try:
            branches = [self._branch()]
            while self._take("|"):
                branches.append(self._branch())
        except RecursionError:
            raise GrammarRefused("it is nested too deeply") from None
        if self._at < len(self._text):
            raise GrammarRefused("a regular expression has a ) without its (")
        if sum(len(branch.text) for branch in branches) > MOST_WRITTEN:
            raise GrammarRefused(f"a regular expression has more than {MOST_WRITTEN} characters in xgrammar's form")
        return branches

    def _branch(self) -> Branch:
        begins = self._take("^")
        text = self._sequence()
        return Branch(text, begins, self._take("$"))

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise GrammarRefused("a regular expression ends too early")
        self._at += 1
        return self._text[self._at - 1]

    @property
    def _ahead(self) -> str:
        return self._text[self._at : self._at + 1]

    def _sequence(self) -> str:
        """Reads up to an alternative, the end of the group or an anchor, which only `_branch` reads."""
        parts = list[str]()
        while self._ahead and self._ahead not in "|)":
            if self._ahead == "$" and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                break
            parts.append(self._repeated(self._one()))
        return " ".join(parts) or '""'

    def _one(self) -> str:
        char = self._next()
        if char == "(":
            return self._group()
        if char in "^$":
            raise GrammarRefused(f"{char} in the middle of a regular expression is not read by xgrammar")
        if char in "*+?{":
            raise GrammarRefused(f"a regular expression has a {char} that repeats nothing")
        if char == "[":
            return self._written(self._class())
        if char == ".":
            return self._written(NO_NEW_LINE)
        return self._written(self._escape(opposite=False) if char == "\\" else _alone(char))

    def _group(self) -> str:
        begin = self._at - 1
        if self._take("?"):
            named = self._take("P<") or (self._take("<") and self._ahead not in "=!")
            if named:
                while self._next() != ">":
                    pass
            elif not self._take(":"):
                what = self._text[begin : begin + 3]
                raise GrammarRefused(f"{what} in a regular expression is not read by xgrammar")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        if not self._take(")"):
            at = self._ahead or "the end"
            raise GrammarRefused(f"a group of a regular expression has no ), but {at}")
        return f"({' | '.join(parts)})"

    def _repeated(self, one: str) -> str:
        if not self._ahead or self._ahead not in "*+?{":
            return one
        sign = self._next()
        if sign == "{":
            sign = self._count()
        self._take("?")  # fewest first: the same texts
        if self._ahead and self._ahead in "*+?{":
            raise GrammarRefused(f"a {self._ahead} behind a repetition is not read by xgrammar")
        return f"{one}{sign}"

    def _count(self) -> str:
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at : max(end, self._at)].partition(",")
        numbers = [number for number in (least, most) if number]
        if not least or not all(number.isascii() and number.isdigit() for number in numbers):
            raise GrammarRefused("a { in a regular expression begins no {m}, {m,} or {m,n}")
        if any(len(number) > len(str(MOST_REPEATED)) or int(number) > MOST_REPEATED for number in numbers):
            raise GrammarRefused(f"a repetition of a regular expression can be at most {MOST_REPEATED} with xgrammar")
        if most and int(most) < int(least):
            raise GrammarRefused(f"{{{least},{most}}} in a regular expression allows nothing")
        self._at = end + 1
        return f"{{{least}{comma}{most}}}"

    def _class(self) -> Ranges:
        negated, parts, opposite, names = self._take("^"), list[Ranges](), False, set[str]()
        while not self._take("]"):
            char = self._next()
            if char == "[" or self._text.startswith(("&&", "--", "~~"), self._at - 1):
                raise GrammarRefused("a class within a class of a regular expression is not read by xgrammar")
            opposite = opposite or (char == "\\" and self._ahead in "dw" and negated)
            if char == "\\":
                names.add(self._ahead)
            first = self._escape(opposite=negated) if char == "\\" else _alone(char)
            if self._ahead == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                first = self._range(first, opposite=negated)
            parts.append(first)
        if not parts:
            raise GrammarRefused("an empty class of a regular expression is not read by xgrammar")
        ranges = ANY if names.issuperset("sS") else union(*parts)
        if negated:
            ranges = complement(ranges)
        return common(ranges, ASCII) if opposite else ranges

    def _range(self, first: Ranges, *, opposite: bool) -> Ranges:
        """Reads the end of a range that begins with a letter. opposite: as in `_escape`."""
        self._at += 1
        char = self._next()
        last = self._escape(opposite=opposite) if char == "\\" else _alone(char)
        ends = [code for part in (first, last) for code in part[0]]
        if char in "[-" or len(first) + len(last) != 2 or ends[0] != ends[1] or ends[2] != ends[3] or ends[0] > ends[2]:
            raise GrammarRefused("a range of a class of a regular expression has no letters at its ends, or none in it")
        return ((ends[0], ends[2]),)

    def _escape(self, *, opposite: bool) -> Ranges:
        """Reads what stands behind a backslash. opposite: of what it names, the opposite is taken."""
        char = self._next()
        if char in NAMED:
            return NAMED[char]
        if char == "s":
            return self._possible_spaces if opposite else self._spaces
        if char == "S" and not opposite:
            return complement(self._possible_spaces)
        if char in "DW" and not opposite:
            return common(complement(NAMED[char.lower()]), ASCII)
        if char in CONTROLS:
            return _alone(CONTROLS[char])
        if char in CODES:
            return _alone(self._code(CODES[char]))
        if char.isascii() and not char.isalnum():
            return _alone(char)
        raise GrammarRefused(f"\\{char} in a regular expression is not read by xgrammar")

    def _code(self, size: int) -> str:
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits, self._at = self._text[self._at : max(end, self._at)], max(end + 1, self._at)
        else:
            digits, self._at = self._text[self._at : self._at + size], self._at + size
        if not 0 < len(digits) <= 8 or set(digits) - set(string.hexdigits) or not 0 < int(digits, 16) <= LAST:
            raise GrammarRefused("an escape of a regular expression has no code of a character that xgrammar reads")
        return chr(int(digits, 16))

    def _written(self, ranges: Ranges) -> str:
        allowed = common(ranges, self._allowed)
        if allowed:
            return written(allowed)
        if self._allowed == IN_JSON:
            raise GrammarRefused("xgrammar does not match a quote, a backslash or a control character in a pattern")
        raise GrammarRefused("a class of a regular expression has no character that xgrammar matches")


def _alone(char: str) -> Ranges:
    return ((ord(char), ord(char)),)
