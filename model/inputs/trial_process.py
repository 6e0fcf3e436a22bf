"""Tries a tokenizer in a process with limits, since a tokenizer is an untrusted program.

Arguments: the model directory, bytes of address space for reading it, seconds of processor time in all. The answer is
JSON on standard output. It is {} for a tokenizer that may be used. `failed` says why it may not be used, `wrong` why it
cannot be read. A tokenizer that needs more than the limits ends the process, by SIGXCPU or by the abort of its library.
Imports little, so that it starts soon.

A text must be tokenized in time and memory that grow with its length. That is tried on runs of one character and the
like (`UNITS`), and on parts of the tokenizer's own expressions. A backtracking expression is slow on long runs of
characters that it names, followed by one that it does not.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from model.errors import CheckpointError, shown
from model.inputs.process_limits import address_space, limit_memory, limit_processor_time
from model.inputs.tokenizer import Tokenizer, TokenizerFailed
from model.inputs.tokenizer_files import load_tokenizer

UNITS = (
    "a",
    " ",
    "\n",
    "0",
    "!",
    "\u00e9",
    "\u4e2d",
    "\ufdfa",
    "\u0301",
    "\0",
    "\U0001f642",
    "aA1 ",
    "a.b@",
    "\u0430b\u05d0 ",
)
"""Letters, spaces, digits, marks, wide characters, a ligature of 18 letters, an accent, control, mixed scripts."""

LONG_UNITS = ("a", " ", "aA1 ")

SHORT, LONG = 2**13, 2**16  # characters of a text
MOST_UNITS = 64  # characters and texts that expressions name
SECONDS = 1.0  # processor time for a text; 65,536 characters take 0.01 to 0.05 s
NOTICED = 0.05  # seconds; shorter times do not show how time grows
PARTS, GROWTH = 16, 4.0  # a text may take GROWTH times the time of its PARTS parts: 1 is linear, 16 quadratic
MEMORY = 256 * 2**20  # bytes for a text beside what the tokenizer itself takes
LONGEST_TOKEN = 4096  # characters; spaces and lines of code make tokens of some hundred
ESCAPED = re.compile(r"\\(?:x\{?([0-9A-Fa-f]{2,6})\}?|u([0-9A-Fa-f]{4}))")


class TokenizerRefused(Exception):
    """The tokenizer may not be used. Says why."""


def try_tokenizer(tokenizer: Tokenizer) -> None:
    """Tries a tokenizer on hard texts.

    Raises:
        TokenizerRefused: It takes too much time or memory.
        TokenizerFailed: Its library panicked.
    """
    if (longest := tokenizer.longest_text()) > LONGEST_TOKEN:
        raise TokenizerRefused(f"has a token of {longest} characters, may have {LONGEST_TOKEN}")
    if (longest := tokenizer.longest_replacement()) > LONGEST_TOKEN:
        raise TokenizerRefused(f"replaces a character by {longest} bytes, may by {LONGEST_TOKEN}")
    named = units_of(tokenizer.expressions())
    # The characters that expressions name follow each run: an expression that cannot match at all is given up early.
    end = "\u2603" + "".join(named)
    for unit in (*UNITS, *named):
        check_growth(partial(check_split, tokenizer, unit, end), unit, SHORT)
    for unit in UNITS:
        longest = LONG if unit in LONG_UNITS else SHORT
        check_growth(partial(check_ids, tokenizer, unit), unit, longest)


def run(unit: str, length: int) -> str:
    """Returns a text of `length` characters that repeats `unit`."""
    return (unit * (length // len(unit) + 1))[:length]


def units_of(expressions: Iterable[str]) -> list[str]:
    """Returns characters in expressions, letters first, and texts that are replaced as a whole."""
    found = set[str]()
    for text in expressions:
        found |= {chr(code) for pair in ESCAPED.findall(text) if (code := int("".join(pair), 16)) <= sys.maxunicode}
        found |= {text[:64], *text[:1000]}
    found = {unit for unit in found if unit and unit.encode(errors="ignore").decode() == unit}
    return sorted(found, key=lambda unit: (not unit.isalnum(), unit))[:MOST_UNITS]


def check_growth(action: Callable[[int], None], unit: str, length: int) -> None:
    """Checks that the time of an action grows at most in proportion to its length.

    Args:
        action: Takes a length.
        unit: Text that it repeats, for the message.
        length: The longest length.

    Raises:
        TokenizerRefused: It takes too long, or its time grows faster.
    """
    whole = _seconds(action, length)
    if whole <= NOTICED:
        return
    parts = sum(_seconds(action, length // PARTS) for _ in range(PARTS))
    whole = min(whole, _seconds(action, length))  # other load only adds to a time, so the minimum is nearer the truth
    if whole > GROWTH * max(parts, NOTICED / GROWTH):
        raise TokenizerRefused(
            f"takes {whole:.2f} s for {length} characters ({shown(unit)}), in {PARTS} parts {parts:.2f} s"
        )
    if whole > SECONDS:
        raise TokenizerRefused(f"takes {whole:.1f} s for {length} characters ({shown(unit)}), may take {SECONDS}")


def _seconds(action: Callable[[int], None], length: int) -> float:
    began = time.process_time()
    try:
        action(length)
    except TokenizerFailed as failure:
        if failure.panicked:
            raise
    return time.process_time() - began  # an ordinary error, as for a character without a token, ends one request


def check_split(tokenizer: Tokenizer, unit: str, end: str, length: int) -> None:
    """Normalizes and cuts a run of `unit`, followed by `end`.

    Raises:
        TokenizerRefused: The text becomes too long.
        TokenizerFailed: See `Tokenizer.split`.
    """
    text = run(unit, length) + end
    size = tokenizer.split(text)
    if size > 1024 + 32 * len(text):
        raise TokenizerRefused(f"makes {size} characters of {len(text)} ({shown(text)})")


def check_ids(tokenizer: Tokenizer, unit: str, length: int) -> None:
    """Encodes a run of `unit`, and decodes the ids.

    Raises:
        TokenizerRefused: It makes too many tokens or characters.
        TokenizerFailed: See `Tokenizer.encode` and `Tokenizer.decode_all`.
    """
    text = run(unit, length)
    size = len(text.encode())
    ids = tokenizer.encode(text, True)
    if len(ids) > 1024 + 16 * size:
        raise TokenizerRefused(f"makes {len(ids)} tokens of {size} bytes ({shown(text)})")
    decoded = tokenizer.decode_all(ids, False)
    if len(decoded) > 1024 + 64 * (size + len(ids)):
        raise TokenizerRefused(f"decodes {len(ids)} tokens to {len(decoded)} characters ({shown(text)})")


def main() -> None:
    directory, memory, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit_processor_time(seconds)
    limit_memory(memory)
    answer = {}
    try:
        tokenizer = load_tokenizer(directory)
        if (has := address_space()) > 0:
            limit_memory(min(memory, has + MEMORY))
        try_tokenizer(tokenizer)
    except CheckpointError as error:
        answer = {"wrong": str(error)}
    except (TokenizerRefused, TokenizerFailed, MemoryError) as error:
        answer = {"failed": str(error) or "needs too much memory"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
