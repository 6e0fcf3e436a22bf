"""Draws odd texts and hostile regular expressions, for `tests.support.hostile_grammars`."""

import random

LETTERS = "abc"
ODD = (
    "", "a", "ab", " ", "\n", "\r\n", "\t", "\x00", "\x7f", "\x1b[2J", '"', "'", "\\", "\\u0000", "\\ud800", "\\x", "/",
    "#", "%", "{{", "}}", "é", "\u00df", "\u0130", "\u2028", "\ufeff", "\u202e", "\ufffd", "\uffff", "\U0001f600",
    "\U0010ffff", "e\u0301", "日本", "<|end|>", "%llguidance", "::=", "../../etc/passwd", "a" * 60, "$ref", "\u00a0",
    "null", "0", "-", "x" * 300,
)  # fmt: skip
HALVES = ("\ud800", "a\udfff", "\udcff\udcfe", "\ud83d\ude00")  # of characters, or bytes that are no UTF-8
SOUND = (
    "a", "b", "ab", ".", r"\w", r"\d", r"\s", r"\W", r"\D", r"\S", "[abc]", "[^a]", "[a-z]", r"\p{L}", r"\P{L}", "é",
    r"\p{Greek}", r"[\p{L}\p{N}]", r"[^\p{L}]", "[a-z&&[^b]]", r"[\w--\d]", "[[:alpha:]]", r"\x41", r"\u0041", "日",
    "\U0001f600", r"\n", r"\.", "(?i:k)", "(?s:.)", "(?:)", "(?i:\u017f)", "&", "~", "a&b",
)  # fmt: skip
"""Patterns by themselves."""
UNSOUND = (
    r"\u{10FFFF}", r"\x{110000}", "(?x: a )", "^", "$", r"\b", r"\A", r"\z", "[\\x00-\\u{10FFFF}]", r"(?i)\w", "[]",
    "[^]", "[", "()", "(?P<n>a)", r"\1", r"\k<n>", "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?>a)", r"\Q", r"\C", r"\X",
    "{,3}", r"\R", r"\p{Nope}", "{", "}", "a{", "*", "+?", ")", "|", r"\xff", r"(?-u:\xff)", "\\",
)  # fmt: skip
QUANTIFIERS = ("*", "+", "?", "*?", "+?", "{2}", "{3,}", "{0,9}", "{1,40}", "{0}", "{5,20}")
GOOD_REGEXES = (
    r"[a-z]+-[0-9]{2,4}", r"(\+\d{1,2} )?\(\d{3}\) \d{3}-\d{4}", r"(?i)(yes|no|maybe)( please)?", r"\p{Lu}\p{Ll}{1,12}",
    r"\{\"a\": (true|false), \"b\": \[(\d+(, \d+)*)?\]\}", r"(https?)://[\w.-]+(/[\w.-]*)*", r"(a|b)*abb",
    r"^\w+@\w+\.com$",
)  # fmt: skip


def size(chance: random.Random, most: int, rare: int) -> int:
    """Returns a number that is small as a rule: up to `most`, and up to `rare` once in 100 times."""
    return int((rare if chance.random() < 1 / 100 else most) ** chance.random()) or 1


def odd_text(chance: random.Random) -> str:
    if chance.random() < 0.01:
        return chance.choice(HALVES)
    return "".join(chance.choice(ODD) for _ in range(chance.choice((1, 1, 2, 3))))


def scratched(chance: random.Random, text: str) -> str:
    """Returns a text with characters that were changed, dropped, doubled, or cut off."""
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(text) + 1)
        to = min(len(text), at + chance.choice((1, 1, 2, 9)))
        new = chance.choice(
            ("", "", odd_text(chance), text[at:to] * 2, chance.choice('{}[]()":,\\/|*+?.^$#%<>~-0'), text[:at])
        )
        text = text[:at] + new[:2000] + text[to:]
    return text if chance.random() < 0.8 else text[: chance.randrange(len(text) + 1)]


def repeat(chance: random.Random) -> str:
    if chance.random() < 0.85:
        return chance.choice(QUANTIFIERS) if chance.random() < 0.98 else chance.choice(("**", "{2}{3}", "{5,2}", "{"))
    high = size(chance, 3000, 10**12)
    return f"{{{chance.randint(0, high)},{high}}}"


def regex(chance: random.Random, depth: int) -> str:
    """Returns a random expression, which is malformed at times."""
    drawn = chance.random()
    if depth <= 0 or drawn < 0.25:
        return chance.choice(SOUND if chance.random() < 0.97 else UNSOUND)
    inner = regex(chance, depth - 1)
    if drawn < 0.5:
        return f"({inner}){repeat(chance)}"
    if drawn < 0.75:
        return inner + regex(chance, depth - 1)
    return "(" + "|".join([inner, *(regex(chance, depth - 1) for _ in range(chance.randint(1, 4)))]) + ")"


def random_regex(chance: random.Random) -> str:
    drawn = chance.random()
    if drawn < 0.7:
        return regex(chance, chance.choice((2, 3, 4, 5, 6)))
    if drawn < 0.8:
        return "|".join(f"{odd_text(chance)[:3]}{i}" for i in range(size(chance, 300, 50_000)))
    if drawn < 0.9:  # states grow with the power of the number
        before, after = chance.choice(("(a|b)*", ".*", r"\w*", "(a|ab|b)*")), size(chance, 24, 3000)
        return f"{before}a(a|b){{{after}}}" + chance.choice(("", ".*b.*", f"(c|a)*b{before}b.{{{after}}}"))
    return "".join(f"[{a}-{b}]" for a, b in _ranges(chance)) + repeat(chance)


def _ranges(chance: random.Random) -> list[tuple[str, str]]:
    points = [
        chr(chance.choice((32, 65, 97, 0x3B1, 0x4E00, 0x1F600, 0xD7FF, 0xE000)) + chance.randint(0, 20))
        for _ in range(8)
    ]
    return [(min(pair), max(pair)) for pair in zip(points[::2], points[1::2], strict=True)]


def nested_regex(chance: random.Random) -> str:
    depth = size(chance, 30, 60_000)
    made = chance.choice(SOUND)
    if depth > 300:
        return "(" * depth + made + chance.choice(("", ")" * depth, "*)" * depth))
    for _ in range(depth):
        made = f"({made}{chance.choice(('', '', made if len(made) < 2000 else ''))}){repeat(chance)}"
    return made


def scratched_regex(chance: random.Random) -> str:
    return scratched(chance, chance.choice(GOOD_REGEXES))
