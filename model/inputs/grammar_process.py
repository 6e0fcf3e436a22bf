"""Tries grammars in a process with limits, since a constraint is an untrusted program.

Each line of JSON on standard input is answered by a line on standard output. The first line has the limits: `memory` is
bytes of address space, `seconds` is processor time for each constraint. Its answer is {}. Each other line has `kind`
and `text` of a constraint. Its answer has `grammar`, which an engine compiles, or `refused`, which says why there is
none. With `unsound` the process's state is not trusted any more.

A constraint that takes too long ends the process with SIGPROF. The end of the input ends it as well.
"""

import json
import signal
import sys
import threading
from typing import Any

from llguidance import LLTokenizer

from model.inputs.grammars import ByteVocabulary, GrammarRefused, grammar_of, try_grammar
from model.inputs.process_limits import limit_memory

STACK = 4 * 2**20  # bytes; engines have 8 MiB


def answer_to(line: str, tokenizer: LLTokenizer) -> dict[str, str]:
    """Returns the answer to a line."""
    try:
        asked = json.loads(line)
        grammar = grammar_of(asked["kind"], asked["text"])
        try_grammar(grammar, tokenizer)
    except GrammarRefused as refused:
        return {"refused": str(refused)}
    except MemoryError:
        return {"refused": "it needs too much memory", "unsound": "1"}
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        return {"refused": f"the library fails on it: {type(error).__name__}", "unsound": "1"}
    return {"grammar": grammar}


def answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def serve() -> None:
    if not (line := sys.stdin.readline()):
        return  # the parent has ended
    first = json.loads(line)
    limit_memory(first["memory"])
    tokenizer = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
    answer({})
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        given = answer_to(line, tokenizer)
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
