"""Tries grammars in a process with limits, since a constraint is an untrusted program.

Each line of JSON on standard input is answered by a line on standard output. The first line has the limits: `memory` is
bytes of address space, `seconds` is processor time for each constraint. Its answer is {}. Each other line has `kind`
and `text` of a constraint. Its answer has `grammar`, which an engine compiles, or `refused`, which says why there is
none. With `unsound` the process's state is not trusted any more.

A constraint that takes too long ends the process with SIGPROF. The end of the input ends it as well.
"""

import json
import random
import signal
import sys
import threading
import time
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from model.inputs.chat_output.formats import ReasoningFormat
from model.inputs.chat_output.grammar import OutputGrammar
from model.inputs.chat_output.grammar_form import OUTPUT, OutputForm
from model.inputs.completion import Completions
from model.inputs.grammars import FIRST_SPECIAL, ByteVocabulary, GrammarRefused, grammar_of, is_list, try_grammar
from model.inputs.process_limits import limit_memory
from scheduler.structured import CHOICE

SEARCH_SECONDS, WIDE = 0.06, 48  # for a short output; alternatives that are looked at
TOKENS, SLOW = 24, 0.05  # that are drawn; seconds of processor time for one, which a step of an engine would wait for
DRAWING_SECONDS = 0.1  # for all of them
STACK = 4 * 2**20  # bytes; engines have 8 MiB


@lru_cache(4)
def tokenizer_of(special: int) -> LLTokenizer:
    """Returns a tokenizer of bytes, and of this many special tokens."""
    return LLTokenizer(ByteVocabulary(special))  # type: ignore[arg-type] # it has what is asked of a wrapper


def output_grammar(form: OutputForm) -> tuple[OutputGrammar, LLMatcher]:
    """Makes the grammar of a form, and tries it.

    Returns:
        The grammar, and the constraint at the start of an output.

    Raises:
        GrammarRefused: It cannot be enforced. Names the field, where it is a tool's.
    """
    tokenizer = tokenizer_of(len(form.ids))
    content: dict[str, Any] | None = None
    if form.answer is not None:
        answer = grammar_of(*form.answer)
        content = json.loads(answer)["grammars"][0] if is_list(answer) else {"lark_grammar": answer}
    made = OutputGrammar(form, tokenizer)
    made.make(content)
    return made, try_grammar(made.text(trial_ids(form)), tokenizer)


@lru_cache(4)
def completions_of(special: int) -> Completions:
    """Returns the finder of completions for `tokenizer_of` as many special tokens."""
    return Completions(tokenizer_of(special), SEARCH_SECONDS, WIDE, WIDE)


def encoded(text: str, marks: list[str]) -> list[int]:
    """Returns the tokens of a marked text."""
    parts = ([FIRST_SPECIAL + marks.index(char)] if char in marks else [*char.encode()] for char in text)
    return [token for part in parts for token in part]


def short_output(
    matcher: LLMatcher, marks: list[str], reasoning: ReasoningFormat | None, thinks: bool
) -> dict[str, str]:
    """Returns a short output, with marks in place of special tokens, and whether it is the shortest.

    No search would find the end of reasoning, within which any text may follow. So the shortest reasoning is put first,
    where there has to be some, or where no output without it is found.

    Args:
        matcher: The constraint at the start of the output.
        marks: Marks of special tokens.
        reasoning: Form of reasoning; None for none.
        thinks: The output begins within the reasoning.
    """
    completions, path, sure = completions_of(len(marks)), None, False
    if reasoning is None or not thinks:
        path, sure = completions.shortest(matcher)
    if path is None and reasoning is not None:
        first = encoded(("" if thinks else reasoning.begin) + reasoning.end.strip(), marks)
        behind = matcher.deep_copy()
        rest = None
        if behind.try_consume_tokens(first) == len(first):
            rest, sure = completions.shortest(behind)
        path, sure = None if rest is None else first + rest, sure and thinks
    if path is None:
        return {}
    runs = groupby(path, key=lambda token: token >= FIRST_SPECIAL)
    parts = (
        [marks[token - FIRST_SPECIAL] for token in run] if special else [bytes(run).decode("utf-8", "replace")]
        for special, run in runs
    )
    short = "".join(part for run in parts for part in run)
    return {"short": short, "sure": "1"} if sure else {"short": short}


def try_tokens(matcher: LLMatcher) -> None:
    """Draws the beginning of an output. The library's bounds hold for masks, not for what a token costs that is taken.

    Args:
        matcher: The constraint at the start of an output. It is not changed.

    Raises:
        GrammarRefused: A token takes too long.
    """
    chance = random.Random(0)  # noqa: S311 - the same tokens in every trial
    end, ahead = time.thread_time() + DRAWING_SECONDS, matcher.deep_copy()
    for _ in range(TOKENS):
        began = time.thread_time()
        mask = np.frombuffer(ahead.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: ByteVocabulary.eos_token_id]).tolist()
        goes_on = bool(allowed) and ahead.consume_token(chance.choice(allowed))
        if (now := time.thread_time()) - began > SLOW:
            raise GrammarRefused(f"it is too complex: a token takes more than {SLOW * 1000:g} ms")
        if not goes_on or now > end:
            return


def trial_ids(form: OutputForm) -> dict[str, int]:
    """Returns the ids that marks have in the vocabulary of a trial."""
    return {mark: FIRST_SPECIAL + i for i, mark in enumerate(form.ids)}


def answer_to(line: str) -> dict[str, str]:
    """Returns the answer to a line."""
    try:
        asked = json.loads(line)
        if asked["kind"] == OUTPUT:
            form = OutputForm.of_text(asked["text"])
            made, matcher = output_grammar(form)
            grammar, marks, reasoning, thinks = made.text(form.ids), list(form.ids), form.reasoning, form.thinks
        else:
            grammar, marks, reasoning, thinks = grammar_of(asked["kind"], asked["text"]), [], None, False
            matcher = try_grammar(grammar, tokenizer_of(0))
        try_tokens(matcher)
        short = short_output(matcher, marks, reasoning, thinks)
        if asked["kind"] == CHOICE:
            short = {"short": min(json.loads(asked["text"]), key=len), "sure": "1"}
    except GrammarRefused as refused:
        return {"refused": str(refused), "field": refused.field}
    except MemoryError:
        return {"refused": "it needs too much memory", "unsound": "1"}
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        return {"refused": f"the library fails on it: {type(error).__name__}", "unsound": "1"}
    return {"grammar": grammar, **short}


def answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def serve() -> None:
    if not (line := sys.stdin.readline()):
        return  # the parent has ended
    first = json.loads(line)
    limit_memory(first["memory"])
    tokenizer_of(0)
    answer({})
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        given = answer_to(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(given)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they ask the server to stop, which drains first
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
