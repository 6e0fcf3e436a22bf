"""Every schema of `written_schemas` does what it says there, judged by the library jsonschema beside the grammar.

Numbers are compared as decimals, and formats that jsonschema does not check without other packages are checked here.
What is known to be wrong is expected to fail, so that it stays in sight.
"""

import decimal
import json
import random
import re
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from model.inputs.grammars import ByteVocabulary, GrammarRefused, grammar_of, limits, try_grammar
from tests.model.written_schemas import SCHEMAS, Written

pytestmark = pytest.mark.sample(3)

END = ByteVocabulary.eos_token_id
TOKENS = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
CLOSERS = frozenset(b'}]"')
SEEDS = 6
MOST = 400  # bytes of a walk

FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid"])
PATTERNS = {
    "duration": r"P(\d+W|(?=.)(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)?(T(?=.)(\d+S|\d+M(\d+S)?|\d+H(\d+M(\d+S)?)?))?)",
    "email": r"(?=[^@]{1,64}@)([\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*|\"[^\"\\]*\")@"
    r"(\[[0-9.]+\]|LABEL(\.LABEL)*)",
    "hostname": r"(?=.{1,253}$)LABEL(\.LABEL)*",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:(//([\w.~!$&'()*+,;=:-]|%[\da-fA-F]{2})*@|//)?"
    r"(?<=//)(\[[^\]]+\]|([\w.~!$&'()*+,;=-]|%[\da-fA-F]{2})*)(:\d*)?(/REST*)?(\?REST*)?(#REST*)?"
    r"|[a-zA-Z][a-zA-Z0-9+.-]*:(?!//)REST*(\?REST*)?(#REST*)?",
}
LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
REST = r"(?:[\w.~!$&'()*+,;=:@/?-]|%[\da-fA-F]{2})"


def _matches(pattern: str, text: object) -> bool:
    whole = pattern.replace("REST", REST).replace("LABEL", LABEL)
    return not isinstance(text, str) or re.fullmatch(whole, text, re.ASCII) is not None


for name, pattern in PATTERNS.items():
    FORMATS.checks(name)(lambda text, pattern=pattern: _matches(pattern, text))


def _is_moment(text: str) -> bool:
    """Tells whether a text is a date-time of RFC 3339, with second 60 at the end of a day of UTC alone."""
    found = re.fullmatch(
        r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|([+-])([01]\d|2[0-3]):([0-5]\d))", text
    )
    if found is None:
        return False
    day, minute, second, sign, hours, minutes = found.groups()
    try:
        moment = datetime.fromisoformat(f"{day}T{minute}:00")
    except ValueError:
        return False
    ahead = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    if second != "60":
        return int(second) < 60
    return (datetime(2000, 1, 2, moment.hour, moment.minute) - ahead).strftime("%H:%M") == "23:59"


FORMATS.checks("date-time")(lambda text: not isinstance(text, str) or _is_moment(text))
FORMATS.checks("time")(lambda text: not isinstance(text, str) or _is_moment(f"2000-01-02T{text}"))


def _is_whole(_: object, value: object) -> bool:
    if isinstance(value, decimal.Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole)
Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=TYPES)


def _read(text: str) -> Any:
    """Reads JSON of which no number is rounded."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_float=decimal.Decimal, parse_constant=refuse)


def _text_of(written: Written) -> str:
    return written.schema if isinstance(written.schema, str) else json.dumps(written.schema)


def is_valid(written: Written, text: str) -> bool:
    """Tells whether a text is JSON that is valid by the schema."""
    try:
        value = _read(text)
    except ValueError:
        return False
    with decimal.localcontext(prec=500):
        return Validator(_read(_text_of(written)), format_checker=FORMATS).is_valid(value)


@cache
def compiled(text: str) -> str:
    grammar = grammar_of("json_schema", text)
    try_grammar(grammar, TOKENS)
    return grammar


def is_accepted(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=limits())
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def walk(grammar: str, seed: int) -> str | None:
    """Returns a text of random bytes that the grammar allows; None if it has not ended after `MOST`."""
    drawn, rng = bytearray(), random.Random(seed)
    matcher = LLMatcher(TOKENS, grammar, log_level=0, limits=limits())
    for _ in range(MOST):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(END + 1) if mask >> token & 1]
        assert allowed, bytes(drawn)
        if allowed[-1] == END and (len(allowed) == 1 or rng.random() < 1 / 2):
            return drawn.decode()
        bytes_allowed = [token for token in allowed if token != END]
        closers = [token for token in bytes_allowed if token in CLOSERS]
        token = rng.choice(closers if closers and rng.random() < 1 / 2 else bytes_allowed)
        assert matcher.consume_token(token)
        drawn.append(token)
    return None


def cases(*, refused: bool) -> list[Any]:
    """Returns parameters of a test: the schemas that are refused or the others."""
    return [pytest.param(one, id=one.name.replace(" ", "-")) for one in SCHEMAS if bool(one.refused) is refused]


@pytest.mark.parametrize("written", cases(refused=False))
def test_texts_are_accepted_and_rejected(written: Written) -> None:
    grammar = compiled(_text_of(written))
    assert [text for text in written.accepts if not is_accepted(grammar, text)] == []
    assert [text for text in written.rejects if is_accepted(grammar, text)] == []


@pytest.mark.parametrize("written", [one for one in SCHEMAS if one.accepts], ids=lambda one: one.name.replace(" ", "-"))
def test_jsonschema_agrees_with_the_table(written: Written) -> None:
    Validator.check_schema(_read(_text_of(written)))
    assert [text for text in written.accepts if not is_valid(written, text)] == []
    valid = [text for text in written.rejects if is_valid(written, text)]
    assert bool(valid) is bool(written.note), valid


@pytest.mark.parametrize("written", cases(refused=False))
def test_walks_are_valid(written: Written) -> None:
    grammar = compiled(_text_of(written))
    texts = {text for seed in range(SEEDS) if (text := walk(grammar, seed)) is not None}
    assert texts, "no walk has ended"
    assert [text for text in texts if not is_valid(written, text)] == []


@pytest.mark.parametrize("written", cases(refused=True))
def test_what_cannot_be_enforced_is_refused(written: Written) -> None:
    with pytest.raises(GrammarRefused) as refused:
        compiled(_text_of(written))
    assert written.refused in str(refused.value)


def test_names_are_unique() -> None:
    assert len({written.name for written in SCHEMAS}) == len(SCHEMAS) >= 200
