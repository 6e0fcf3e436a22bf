"""Hostile context-free grammars in Lark's syntax and in GBNF, for `tests.support.hostile_grammars`."""

import random

from tests.support.hostile_texts import odd_text, regex, repeat, scratched, size

GOOD_LARKS = (
    'start: sum\nsum: product (("+" | "-") product)*\nproduct: atom ("*" atom)*\natom: NUMBER | "(" sum ")"\n'
    "NUMBER: /[0-9]+/\n%ignore / /\n",
    'start: "SELECT " cols " FROM " NAME (" WHERE " cond)?\ncols: NAME (", " NAME)*\ncond: NAME " = " NAME\n'
    "NAME: /[a-z]{1,8}/\n",
    'start: value\nvalue: "[" (value ("," value)*)? "]" | "{" (pair ("," pair)*)? "}" | TEXT\npair: TEXT ":" value\n'
    'TEXT: /"[^"]*"/\n',
    "%import common.INT\n%import common.WS\nstart: line+\nline: INT WS\n",
    'start: "a" start "b" | ""\n// comment\n',
)
GOOD_GBNFS = (
    'root ::= "yes" | "no"\n',
    'root ::= object\nobject ::= "{" ws (pair ("," ws pair)*)? "}"\npair ::= [a-z]+ ":" ws [0-9]{1,3}\n'
    "ws ::= [ \\t\\n]*\n",
    'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"\n',
)
LINES = (
    "%ignore /x*/", "%ignore A", "%import common.NUMBER", "%import common.NOPE", "%import python.NAME", "%declare X",
    "%extend r0: A", "%override r0: A", '%llguidance {"no_forcing": true}', '%json {"type": "object"}',
    'x: %json {"minItems": 1}', 'x: %regex {"substring_words": "a b c"}', 'x: %regex {"substring_chars": "aaaa"}',
    "x: %regex { }", "x: <|end|>", "x: <[1-9]>", "x: @other", "x{a, b}: a b", "r0.5: A", "?r0: A", "!r0: A", "_r0: A",
    "r0[max_tokens=0]: A", "r0[stop=/x/]: A", 'r0[capture, suffix="a"]: /.*/', "r0[temperature=9]: A",
    "r0[lazy]: /a*/", "r0: A -> alias", "start: A", "r0::0x1: A", "A: A", "A: r0",
    "r0[max_tokens=99999999999999999999]: A", "x: r0::_ %if is_ones(_)", "A: B\nB: A", "A: /a/ & ~/b/",
    "r0::set_bit(3): A", "\x00", ":", "x:",
)  # fmt: skip


def literal(chance: random.Random) -> str:
    drawn = chance.random()
    if drawn < 0.5:
        return chance.choice(('"a"', '"b"', '"ab"', '""', '"a"i', '"\\n"', '"a".."z"', '"\\u00e9"', "/[^b]/", "/a+/"))
    if drawn < 0.8:
        flags = chance.choice(("i", "s", "imsux", "q")) if chance.random() < 0.1 else ""
        return "/" + regex(chance, 2).replace("/", "\\/") + "/" + flags
    if drawn < 0.82:
        return '"' + odd_text(chance) + '"'
    return '"' + chance.choice("ab") * size(chance, 500, 500_000) + '"'


def random_lark(chance: random.Random) -> str:
    """Returns rules that lead to each other in any way: to the left, in circles, to nothing, ambiguously."""
    rules, terminals = size(chance, 25, 2000), chance.randint(0, 4)

    def item(depth: int) -> str:
        drawn = chance.random()
        if drawn < 0.35:
            return f"r{chance.randrange(rules)}"
        if drawn < 0.45 and terminals:
            return "ABCD"[chance.randrange(terminals)]
        if drawn < 0.75 or depth <= 0:
            return literal(chance)
        inner = alternatives(depth - 1)
        many = chance.choice(("*", "+", "?", "", "~3", "~1..5", f"~{size(chance, 300, 10**10)}", repeat(chance)))
        return chance.choice((f"({inner}){many}", f"[{inner}]"))

    def alternatives(depth: int) -> str:
        several = (
            " ".join(item(depth) for _ in range(chance.choice((1, 1, 2, 3))))
            for _ in range(chance.choice((1, 1, 2, 4)))
        )
        return " | ".join(several)

    lines = [f"start: {alternatives(1)}", *(f"r{i}: {alternatives(2)}" for i in range(rules))]
    lines += [
        f"{'ABCD'[i]}: {' '.join(literal(chance) for _ in range(chance.choice((1, 1, 3))))}" for i in range(terminals)
    ]
    if chance.random() < 0.3:
        lines += [chance.choice(LINES) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.2:
        chance.shuffle(lines)
    return "\n".join(lines)


def random_gbnf(chance: random.Random) -> str:
    if chance.random() < 0.4:
        return scratched(chance, chance.choice(GOOD_GBNFS))
    rules = size(chance, 15, 1000)

    def item(depth: int) -> str:
        drawn = chance.random()
        if drawn < 0.4:
            return f"r{chance.randrange(rules)}"
        if drawn < 0.8 or depth <= 0:
            odd = odd_text(chance) if chance.random() < 0.1 else chance.choice(("a", "xy", " ", "é"))
            return chance.choice(('"a"', '"ab"', "[a-z]", "[^a]", r"[\x41-\x5A]", ".", f'"{odd}"', f"[{odd}]", '""'))
        return f"({alternatives(depth - 1)}){chance.choice(('*', '+', '?', '', repeat(chance)))}"

    def alternatives(depth: int) -> str:
        several = (
            " ".join(item(depth) for _ in range(chance.choice((1, 2, 3)))) for _ in range(chance.choice((1, 1, 2, 3)))
        )
        return " | ".join(several)

    lines = [f"root ::= {alternatives(1)}", *(f"r{i} ::= {alternatives(2)}" for i in range(rules))]
    return "\n".join(lines) if chance.random() < 0.9 else scratched(chance, "\n".join(lines))


def scratched_lark(chance: random.Random) -> str:
    text = chance.choice(GOOD_LARKS)
    if chance.random() < 0.4:
        text += "\n" + chance.choice(LINES)
    return scratched(chance, text) if chance.random() < 0.9 else text


def deep_grammar(chance: random.Random) -> str:
    depth = size(chance, 2000, 60_000)
    begin = chance.choice(("(", "[", '("a" ', '("a" | ', "(r0 "))
    inner = begin * depth + '"a"' + (")" if begin != "[" else "]") * depth
    if chance.random() < 0.3:
        return f"root ::= {inner}\nr0 ::= root"
    chain = "".join(f"\nr{i}: r{i + 1}" for i in range(depth)) + f'\nr{depth}: "a"'
    return f"start: {inner}\nr0: start" if chance.random() < 0.6 else f"start: r0{chain}"
