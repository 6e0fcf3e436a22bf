"""Tries grammars in a process with limits, since a constraint is an untrusted program.

Each line of JSON on standard input is answered by a line on standard output. The first line has the limits: `memory` is
bytes of address space, `seconds` is processor time for each constraint. It names the library that keeps what it can of
constraints, too: `backend`. Its answer is {}. Each other line has `kind` and `text` of a constraint. Its answer has
`grammar`, which an engine compiles, or `refused`, which says why there is none.
`model.inputs.grammar_checker.Checked` describes the rest of it. With `unsound` the process's state is not trusted any
more. A line that has `output` too asks which beginnings of that text are complete outputs of the constraint; `ends` has
their lengths. The answer has the lengths of those that are as `complete`, and `over` where no longer text is an output.

A constraint that takes too long ends the process with SIGPROF. The end of the input ends it as well.
"""

import json
import random
import signal
import sys
import threading
import time
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLTokenizer

from model.inputs.chat_output.formats import ReasoningFormat
from model.inputs.chat_output.grammar import OutputGrammar
from model.inputs.chat_output.grammar_form import OUTPUT, OutputForm
from model.inputs.completion import Completions
from model.inputs.grammar_backends import LLGUIDANCE, XGRAMMAR
from model.inputs.grammars import FIRST_SPECIAL, ByteVocabulary, GrammarRefused, grammar_of, is_list, try_grammar
from model.inputs.matcher import Matcher
from model.inputs.output_states import OutputStates
from model.inputs.process_limits import address_space, limit_memory
from model.inputs.tag_grammar import PATH, TagGrammar, grammar_of_any
from scheduler.structural_tags import read_tags
from scheduler.structured import CHOICE, GRAMMAR, STRUCTURAL_TAG

if TYPE_CHECKING:
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

SEARCH_SECONDS, WIDE = 0.06, 48  # for a short output; alternatives that are looked at
TOKENS, SLOW = 24, 0.05  # that are drawn; seconds of processor time for one, which a step of an engine would wait for
DRAWING_SECONDS = 0.1  # for all of them
TAGS_SECONDS = 0.2  # for what is drawn of all structural tags, and for their short forms
ENDLESS = "no end of it was found: its last terminal may take the end marker too, where a regex stops at the first one"
MOST_COMPILED = 8  # matchers that are kept, of 4 MiB for a large schema
STACK = 4 * 2**20  # bytes; engines have 8 MiB


@lru_cache(4)
def tokenizer_of(special: int) -> LLTokenizer:
    """Returns a tokenizer of bytes, and of this many special tokens."""
    return LLTokenizer(ByteVocabulary(special))  # type: ignore[arg-type] # it has what is asked of a wrapper


def output_grammar(form: OutputForm) -> tuple[OutputGrammar, Matcher]:
    """Makes the grammar of a form, and tries it.

    Returns:
        The grammar, and the constraint at the start of an output.

    Raises:
        GrammarRefused: It cannot be enforced. Names the field, where it is a tool's.
    """
    tokenizer = tokenizer_of(len(form.ids))
    made, content = OutputGrammar(form, tokenizer), list[dict[str, Any]]()
    if form.answer is not None and form.answer[0] == STRUCTURAL_TAG:
        content = TagGrammar(form.answer[1], form.special).make(made.begun_reasoning())
    elif form.answer is not None:
        answer = grammar_of(*form.answer)
        content = json.loads(answer)["grammars"][:1] if is_list(answer) else [{"lark_grammar": answer}]
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


def short_output(matcher: Matcher, marks: list[str], reasoning: ReasoningFormat | None, thinks: bool) -> dict[str, str]:
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
    short = decoded(path, marks)
    return {"short": short, "sure": "1"} if sure else {"short": short}


def decoded(tokens: list[int], marks: list[str]) -> str:
    """Returns the marked text of tokens, as far as it is Unicode."""
    runs = groupby(tokens, key=lambda token: token >= FIRST_SPECIAL)
    parts = (
        [marks[token - FIRST_SPECIAL] for token in run] if special else [bytes(run).decode("utf-8", "replace")]
        for special, run in runs
    )
    return "".join(part for run in parts for part in run)


def try_tags(matcher: Matcher, form: OutputForm) -> dict[str, str]:
    """Tries structural tags, at whose beginning no other trial comes.

    Args:
        matcher: The constraint at the start of an output. It is not changed.
        form: What the output must be.

    Returns:
        The longest one among the short forms of tags, as `closing`, where one is found in time.

    Raises:
        GrammarRefused: A tag cannot be written, or a token of it takes too long. Names the field.
    """
    if form.answer is None or form.answer[0] != STRUCTURAL_TAG:
        return {}
    made, marks, reasoning = TagGrammar(form.answer[1], form.special), list(form.ids), form.reasoning
    before = "" if reasoning is None else (reasoning.end.strip() if form.thinks else "") + reasoning.content
    end, found = time.thread_time() + TAGS_SECONDS, list[list[int]]()
    for tag in made.tags.tags:
        begun, behind = encoded(made.marked(tag.begin), marks), matcher.deep_copy()
        behind.try_consume_tokens(encoded(before, marks) + begun)
        if not any(behind.compute_bitmask()) or behind.is_error():
            raise GrammarRefused("it allows no text", tag.field)
        if (left := end - time.thread_time()) > 0:
            try_tokens(behind, min(left, DRAWING_SECONDS), tag.field)
            if (path := completions_of(len(marks)).find(behind)) is not None:
                found.append(begun + path)
            elif tag.kind == GRAMMAR:
                raise GrammarRefused(ENDLESS, tag.field)
    return {"closing": decoded(max(found, key=len), marks)} if found else {}


def named(refused: GrammarRefused, structured: tuple[str, str] | None) -> GrammarRefused:
    """Returns why tags are refused with the field of the tag whose content is, where it is one's alone."""
    if structured is None or structured[0] != STRUCTURAL_TAG or refused.field:
        return refused
    for tag in read_tags(structured[1], PATH).tags:
        try:
            if tag.text:
                try_grammar(grammar_of(tag.kind, tag.text), tokenizer_of(0))
        except GrammarRefused as inner:
            return GrammarRefused(str(inner), tag.field)
    return refused


def try_tokens(matcher: Matcher, seconds: float = DRAWING_SECONDS, field: str = "") -> None:
    """Draws the beginning of an output. The library's bounds hold for masks, not for what a token costs that is taken.

    Args:
        matcher: The constraint at the start of an output. It is not changed.
        seconds: Processor time for all tokens.
        field: The client's name of what is drawn.

    Raises:
        GrammarRefused: A token takes too long.
    """
    chance = random.Random(0)  # noqa: S311 - the same tokens in every trial
    end, ahead = time.thread_time() + seconds, matcher.deep_copy()
    for _ in range(TOKENS):
        began = time.thread_time()
        mask = np.frombuffer(ahead.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: ByteVocabulary.eos_token_id]).tolist()
        goes_on = bool(allowed) and ahead.consume_token(chance.choice(allowed))
        if (now := time.thread_time()) - began > SLOW:
            raise GrammarRefused(f"it is too complex: a token takes more than {SLOW * 1000:g} ms", field)
        if not goes_on or now > end:
            return


def trial_ids(form: OutputForm) -> dict[str, int]:
    """Returns the ids that marks have in the vocabulary of a trial."""
    return {mark: FIRST_SPECIAL + i for i, mark in enumerate(form.ids)}


def form_of(kind: str, text: str) -> OutputForm:
    """Returns the form of a constraint of any kind."""
    return OutputForm.of_text(text) if kind == OUTPUT else OutputForm(None, None, answer=(kind, text))


def compiled(kind: str, form: OutputForm, backend: str = LLGUIDANCE) -> tuple[str, Matcher]:
    """Returns the grammar of a constraint and its matcher. backend: one of `BACKENDS`. Raises GrammarRefused."""
    if kind == OUTPUT:
        made, matcher = output_grammar(form)
        return made.text(form.ids), matcher
    if form.answer is None:
        raise ValueError("a constraint of this kind has an answer")
    grammar = grammar_of_any(*form.answer)
    checked = grammar, try_grammar(grammar, tokenizer_of(0))
    return by_xgrammar(*form.answer) or checked if backend == XGRAMMAR else checked


def by_xgrammar(kind: str, text: str) -> tuple[str, Matcher] | None:
    """Returns the grammar of a constraint that XGrammar keeps, and its matcher; None for one that it does not keep.

    Raises:
        GrammarRefused: It is of a kind that XGrammar keeps, but it would not keep all of it.
    """
    from model.inputs.with_xgrammar import grammars

    if not grammars.serves(kind, text):
        return None
    grammar = grammars.grammar_of(kind, text)
    return grammar, grammars.try_grammar(grammar, compiler())


@lru_cache(1)
def compiler() -> "XGrammarCompiler":
    """Returns XGrammar's compiler for `tokenizer_of` no special tokens."""
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

    return XGrammarCompiler(tokenizer_of(0))


@lru_cache(MOST_COMPILED)
def matcher_of(kind: str, text: str, backend: str = LLGUIDANCE) -> tuple[Matcher, list[str]]:
    """Returns the matcher of a constraint that was accepted, and the marks of its special tokens."""
    form = form_of(kind, text)
    return compiled(kind, form, backend)[1], list(form.ids)


def answer_to(line: str, states: OutputStates | None = None, backend: str = LLGUIDANCE) -> dict[str, Any]:
    """Returns the answer to a line.

    Args:
        line: The line.
        states: Of outputs that were asked about before; None for none.
        backend: One of `BACKENDS`.
    """
    try:
        asked = json.loads(line)
        kind, text = asked["kind"], asked["text"]
        if (output := asked.get("output")) is not None:
            known = OutputStates(partial(matcher_of, backend=backend), encoded) if states is None else states
            return known.complete_ends(kind, text, output, asked["ends"])._asdict()
        form = form_of(kind, text)
        try:
            grammar, matcher = compiled(kind, form, backend)
        except GrammarRefused as refused:
            raise named(refused, form.answer) from None
        try_tokens(matcher)
        short = short_output(matcher, list(form.ids), form.reasoning, form.thinks) | try_tags(matcher, form)
        if kind == CHOICE:
            short = {"short": min(json.loads(text), key=len), "sure": "1"}
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
    tokenizer_of(0)
    if first["backend"] == XGRAMMAR:
        compiler()  # reads torch, which takes much of an address space
    limit_memory(first["memory"] + (address_space() if first["backend"] == XGRAMMAR else 0))
    answer({})
    states = OutputStates(partial(matcher_of, backend=first["backend"]), encoded)
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        given = answer_to(line, states, first["backend"])
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
