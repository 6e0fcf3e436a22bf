"""Compiled grammars of an engine, cached by content."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from model.errors import RequestFault
from model.inputs.completion import Completions
from model.inputs.grammar_backends import EXTRA, MARK, is_for_xgrammar
from model.inputs.matcher import Matcher
from model.structured.closing import completed
from model.structured.compiled_grammar import CompiledGrammar
from model.structured.forcing import Forcing
from model.structured.held_grammars import HeldGrammars, Key
from model.structured.mask_threads import MaskThreads

if TYPE_CHECKING:  # an engine runs without the libraries too, and has no structured output then
    from llguidance import LLTokenizer

    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

MOST_CACHED, MOST_TEXT = 1024, 2**22  # grammars, and characters of them all; compiled they take some 270 times that

XGRAMMARS = 10  # characters that one of a grammar of XGrammar counts as, by the memory of its compiled form

SECONDS = 0.045  # of processor time, for a completion of an output

log = logging.getLogger("quire.sampling")


def _opened(vocabulary: "Callable[[], LLTokenizer]") -> "tuple[LLTokenizer, Completions, Forcing]":
    loaded = vocabulary()
    return loaded, Completions(loaded, SECONDS), Forcing(loaded)


def _size(key: Key) -> int:
    return len(key[0]) * (XGRAMMARS if is_for_xgrammar(key[0]) else 1)


def _weight(key: Key, future: Future[CompiledGrammar]) -> int:
    """Returns the characters that a cached grammar counts as."""
    known = future.done() and not future.cancelled() and future.exception() is None
    return _size(key) * (future.result().times if known else 1)


class GrammarStore:
    """Compiles grammars in a thread of its own, one after the other, and caches those that were used last.

    A grammar is cached by its text and by the salt of its tenant, so that none learns from the time of an answer which
    constraints another one has.

    Attributes:
        threads: They compute the masks of a step.
    """

    def __init__(self, vocabulary: "Callable[[], LLTokenizer]", threads: int = 1) -> None:
        """Begins to read the vocabulary.

        Args:
            vocabulary: Loads the model's vocabulary. Called once, in the thread.
            threads: That compute masks.
        """
        self.threads = MaskThreads(threads)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="quire-grammars")
        self._vocabulary = self._compiler.submit(_opened, vocabulary)
        self._lock = threading.Lock()
        self._cached: OrderedDict[Key, Future[CompiledGrammar]] = OrderedDict()
        self._text = 0  # characters of all that are cached
        self._held = HeldGrammars(MOST_CACHED, MOST_TEXT)
        self._compiling = threading.Lock()  # held where XGrammar reads the vocabulary
        self._xgrammar: XGrammarCompiler | None = None
        self._awaited: frozenset[Key] = frozenset()

    def opened(self) -> bool:
        """Waits for the vocabulary. Returns whether there is one; the log says why there is none."""
        try:
            self._vocabulary.result()
        except Exception as error:  # whatever a tokenizer's file is: the model can be served without
            log.warning("structured output is not available: %s", error)
            return False
        return True

    @property
    def count(self) -> int:
        """The number of cached grammars, of which some may wait for their compilation."""
        return len(self._cached)

    def await_only(self, awaited: Collection[Key]) -> None:
        """Says which grammars requests wait for. Others that are not compiled yet never will be."""
        with self._lock:
            self._held.forget_ended()
            self._awaited = frozenset(awaited)
            for key in [key for key, future in self._cached.items() if key not in self._awaited and future.cancel()]:
                self._drop(key)

    def ready(self, grammar: str, salt: str, reasoning_end: Sequence[int] | None = None) -> bool:
        """Returns whether a matcher can be made at once; begins to compile the grammar where it is not.

        Args:
            grammar: The grammar.
            salt: That of those who share its compiled form.
            reasoning_end: Tokens that end the reasoning of an output that is closed in time, () where there is none:
                its completion from the start is searched for too. None for an output that is not closed.

        Raises:
            RequestFault: The grammar cannot be compiled.
        """
        key = (grammar, salt)
        with self._lock:
            self._held.forget_ended()
            future = self._cached.get(key)
            if future is None:
                held = self._held.get(key)
                future = self._insert(key, held or self._compiler.submit(self._compile, grammar, reasoning_end))
            self._cached.move_to_end(key)
        if not future.done():
            return False
        future.result()
        return True

    def hold(self, owner: object, grammar: str, salt: str) -> None:
        """Keeps a grammar that is ready compiled until a request is dropped, also where it is evicted.

        Else a request whose grammar is evicted while it waits for a row would have it compiled in a step. The grammars
        of all requests have the bounds of the cache, beside it; beyond these none is kept.

        Args:
            owner: The request.
            grammar: Its grammar.
            salt: As in `ready`.
        """
        with self._lock:
            future = self._cached.get((grammar, salt))
            if future is not None and future.done():
                self._held.hold(owner, (grammar, salt), future, _weight((grammar, salt), future))

    @property
    def completions(self) -> Completions:
        """Finds completions of outputs."""
        return self._vocabulary.result()[1]

    @property
    def forcing(self) -> Forcing:
        """Finds forced tokens."""
        return self._vocabulary.result()[2]

    def compiled(self, grammar: str, salt: str) -> CompiledGrammar:
        """Returns a compiled grammar. Compiles it where it is neither cached nor held.

        Raises:
            RequestFault: The grammar cannot be compiled.
        """
        key = (grammar, salt)
        with self._lock:
            future = self._cached.get(key) or self._held.get(key)
        if future is None or not future.done():
            future = Future()
            future.set_result(self._compile(grammar))
        with self._lock:
            if key in self._cached:
                self._cached[key] = future
                self._cached.move_to_end(key)
            else:
                self._insert(key, future)
        compiled = future.result()
        if not is_for_xgrammar(grammar):  # whose masks wait for no lock
            compiled.compile_again(self.threads.count, lambda: self._compiler.submit(self._compile_again, key, future))
        return compiled

    def _insert(self, key: Key, future: Future[CompiledGrammar]) -> Future[CompiledGrammar]:
        """Caches a grammar, and evicts those that were not used for longest. Called with the lock."""
        self._cached[key] = future
        self._text += _weight(key, future)
        # Those that requests wait for are asked for again and again, so they stand at the end.
        while len(self._cached) > MOST_CACHED or self._text > MOST_TEXT:
            first = next(iter(self._cached))
            if first == key or first in self._awaited:
                break
            self._drop(first)
        return future

    def _drop(self, key: Key) -> None:
        self._text -= _weight(key, self._cached.pop(key))

    def _compile(self, grammar: str, reasoning_end: Sequence[int] | None = None) -> CompiledGrammar:
        compiled = CompiledGrammar(self._matcher(grammar), partial(completed, self.completions))
        try:
            compiled.look_at_start(self.forcing, self.completions.ends)
            if reasoning_end is not None:
                compiled.path(reasoning_end)
        except BaseException as error:  # a panic of the library's Rust code is no Exception
            log.exception("the start or the completions of a grammar cannot be looked at")
            raise RequestFault(f"structured_output cannot be completed: {type(error).__name__}") from None
        return compiled

    def _compile_again(self, key: Key, future: Future[CompiledGrammar]) -> None:
        matcher = self._matcher(key[0])
        with self._lock:
            cached, held = self._cached.get(key) is future, self._held.get(key) is future
            if cached or held:
                future.result().add(matcher)
            if cached:
                self._text += _size(key)
            if held:
                self._held.grew(key, _size(key))

    def _matcher(self, grammar: str) -> Matcher:
        from llguidance import LLMatcher

        from model.inputs.grammars import limits, shown

        try:
            if is_for_xgrammar(grammar):
                return self._compiler_of_xgrammar().matcher(grammar.removeprefix(MARK))
            matcher = LLMatcher(self._vocabulary.result()[0], grammar, log_level=0, limits=limits())
        except ImportError:
            raise RequestFault(f"structured_output cannot be compiled: this engine has no xgrammar: {EXTRA}") from None
        except BaseException as error:  # a panic of the library's Rust code is no Exception
            log.exception("a grammar cannot be compiled")
            raise RequestFault(f"structured_output cannot be compiled: {type(error).__name__}") from None
        if matcher.is_error():
            raise RequestFault(f"structured_output cannot be compiled: {shown(matcher.get_error())}")
        return matcher

    def _compiler_of_xgrammar(self) -> "XGrammarCompiler":
        """Returns XGrammar's compiler, which the first of its grammars makes. Raises ImportError without XGrammar."""
        from model.inputs.with_xgrammar.matcher import XGrammarCompiler

        with self._compiling:
            if self._xgrammar is None:
                self._xgrammar = XGrammarCompiler(self._vocabulary.result()[0])
            return self._xgrammar

    def close(self) -> None:
        """Ends the threads, that of the compiler after the grammar that it compiles."""
        self.threads.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)
