"""Checks constraints: the frontend's side of `model.inputs.grammar_process`."""

import json
import logging
import signal
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from model.inputs.chat_output.grammar_form import OutputConstraint
from model.inputs.fair_lock import FairLock
from model.inputs.grammar_backends import LLGUIDANCE
from model.inputs.grammars import GrammarRefused
from model.inputs.line_process import LineProcess
from scheduler.structured import Structured

log = logging.getLogger("quire.inputs")

SECONDS = 1.0  # processor time for a constraint
MEMORY = 1 << 30  # bytes of address space; 240 MiB are taken at the start, most of them for threads' stacks
MOST_CACHED = 512  # answers
TRIES = 2  # a process may be killed by others, as by the kernel where memory is short
NOT_STARTED = 1  # exit code in place of that of a process that was lost before it got the constraint
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)  # of the constraint: a stack that is full, an allocation
START_WAIT = 60.0  # seconds for a process that reads XGrammar, which reads torch
MOST_ANSWER = 64 * 2**20  # bytes; a grammar is about as long as its constraint
SLICE = 2**15  # characters of an output, about whose beginnings one line asks
NOTHING: Mapping[str, Any] = {}


Constraint = Structured | OutputConstraint
Asked = tuple[str, Constraint]
"""With whom the answer is shared, and what was asked."""


class Checked(NamedTuple):
    """A constraint that can be enforced.

    Attributes:
        grammar: Grammar of llguidance, or of XGrammar behind its mark.
        short: A short output, with marks in place of special tokens; None where none was found.
        sure: It is the shortest, as far as a search came to its end.
        closing: The longest among the short forms of structural tags; "" without tags, and where none was found.
    """

    grammar: str
    short: str | None = None
    sure: bool = False
    closing: str = ""


class GrammarUnchecked(RuntimeError):
    """The process died of something else than the constraint, again and again. Says how."""


class GrammarChecker:
    """One process, which tries one constraint at a time. It starts at the first one, and again after its end.

    Safe to use from several threads. Answers are cached by tenant, so that none learns from the time of an answer which
    constraints another one has.
    """

    def __init__(self, backend: str = LLGUIDANCE) -> None:
        """Makes it. backend: the library that keeps what it can of constraints, one of `BACKENDS`."""
        self._backend = backend
        self._asking = FairLock()  # held from a line to its answer
        self._caching = threading.Lock()
        self._process: LineProcess | None = None
        self._cached: OrderedDict[Asked, Checked | GrammarRefused] = OrderedDict()
        self._closed = False

    def grammar(self, constraint: Constraint, sharing: str) -> Checked:
        """Returns the grammar of a constraint, which an engine compiles, and a short output of it.

        Args:
            constraint: The constraint.
            sharing: Requests that share the answer, as in `Spec.sharing`.

        Raises:
            GrammarRefused: It is malformed, cannot be enforced, or takes too much time or memory.
            GrammarUnchecked: The process cannot be started, or dies of something else.
            RuntimeError: The checker is closed.
        """
        key = (sharing, constraint)
        if (found := self._find(key)) is None:
            with self._asking:
                if (found := self._find(key)) is None:  # another thread may have asked the same
                    try:
                        found = self._ask(constraint)
                    except BaseException:  # as KeyboardInterrupt: this answer must not be taken for the next one's
                        self._end()
                        raise
                    self._cache(key, found)
        if isinstance(found, GrammarRefused):
            raise GrammarRefused(str(found), found.field)
        return found

    def is_complete(self, constraint: Constraint, text: str) -> bool:
        """Returns whether a text is a complete output. Arguments and exceptions are those of `complete_ends`."""
        return bool(self.complete_ends(constraint, text, (len(text),)))

    def complete_ends(self, constraint: Constraint, text: str, ends: Sequence[int]) -> list[int]:
        """Returns which beginnings of a text are complete outputs. Answers are not cached: each is of one output.

        The process is asked once for each slice of the text that has ends, and answers others meanwhile. Each slice has
        `SECONDS`.

        Args:
            constraint: A constraint that `grammar` has accepted.
            text: The text, with marks in place of special tokens.
            ends: Lengths of the beginnings, in ascending order.

        Returns:
            Lengths of those that are complete, in ascending order.

        Raises:
            GrammarUnchecked: The process cannot be started, or dies, or a slice takes too much time.
            RuntimeError: The checker is closed.
        """
        complete = list[int]()
        for _, group in groupby(ends, key=lambda end: end // SLICE):
            part = [*group]
            with self._asking:
                try:
                    answer = self._answer(constraint, {"output": text[: part[-1]], "ends": part})
                except BaseException:  # as in `grammar`
                    self._end()
                    raise
            if isinstance(answer, GrammarRefused):
                raise GrammarUnchecked(f"an output could not be compared with its constraint: {answer}")
            complete += answer["complete"]
            if answer["over"]:
                break
        return complete

    @property
    def busy(self) -> bool:
        """Whether the process has a constraint to answer."""
        return self._asking.locked()

    def knows(self, constraint: Constraint, sharing: str) -> bool:
        """Returns whether the answer is cached, so that `grammar` does not wait."""
        return self._find((sharing, constraint)) is not None

    def _find(self, key: Asked) -> Checked | GrammarRefused | None:
        with self._caching:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
            return found

    def _cache(self, key: Asked, answer: Checked | GrammarRefused) -> None:
        with self._caching:
            self._cached[key] = answer
            while len(self._cached) > MOST_CACHED:
                self._cached.popitem(last=False)

    def _ask(self, constraint: Constraint) -> Checked | GrammarRefused:
        answer = self._answer(constraint)
        if isinstance(answer, GrammarRefused):
            return answer
        return Checked(answer["grammar"], answer.get("short"), "sure" in answer, answer.get("closing", ""))

    def _answer(self, constraint: Constraint, more: Mapping[str, Any] = NOTHING) -> dict[str, Any] | GrammarRefused:
        """Returns the process's answer about a constraint. more: asks about one of its outputs."""
        line = json.dumps({"kind": constraint.kind, "text": constraint.text, **more})
        for _ in range(TRIES):
            answer, code = self._exchange(line)
            if answer is not None:
                if "unsound" in answer:
                    self._end()
                return _refused(answer) if "refused" in answer else answer
            if code == -signal.SIGPROF:
                return GrammarRefused(f"it takes more than {SECONDS:g} s to compile")
            if code in CRASHES:
                return GrammarRefused("it is too complex")
            log.warning("the process that checks grammars ended (code %d) or hung", code)
        raise GrammarUnchecked("the constraint could not be checked: its process ended or hung")

    def _exchange(self, line: str) -> tuple[dict[str, Any] | None, int]:
        """Returns the answer, or None and the exit code of the process, which has ended then."""
        if self._closed:
            raise RuntimeError("this checker is closed")
        if self._process is None:
            try:
                self._process = LineProcess("model.inputs.grammar_process")
            except OSError as error:
                raise GrammarUnchecked(f"the constraint could not be checked: {error.strerror}") from None
            first = json.dumps({"memory": MEMORY, "seconds": SECONDS, "backend": self._backend})
            if self._process.ask(first, 2**16, START_WAIT) is None:
                self._end()
                return None, NOT_STARTED
        answer = self._process.ask(line, MOST_ANSWER)
        return (None, self._end()) if answer is None else (answer, 0)

    def _end(self) -> int:
        process, self._process = self._process, None
        return 0 if process is None else process.end()

    def close(self) -> None:
        """Ends the process; a thread that waits for it gets an error. A second call does nothing."""
        self._closed = True
        # Killed without the lock: a thread that asks holds it until the process answers or ends.
        process = self._process
        if process is not None:
            process.kill()
        with self._asking:
            self._end()


def _refused(answer: dict[str, Any]) -> GrammarRefused:
    return GrammarRefused(answer["refused"], answer.get("field", ""))
