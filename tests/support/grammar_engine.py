"""The engine's side of structured output in a process of its own, which may die of a grammar.

`GrammarEngine.serve` compiles a grammar as an engine does, and draws the first tokens of an output with it.
"""

import json
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLTokenizer

import model
from model.errors import RequestFault
from model.inputs.grammars import ByteVocabulary
from model.structured.forbidding import apply_masks
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import GrammarStore
from scheduler.controls import LogitsParams

TOKENS = 12  # of an output, which is closed in time
MEMORY = 2 * 2**30  # bytes that a grammar may take
SECONDS = 5.0  # of processor time for a grammar
WAIT = 120.0  # seconds for an answer, also where the process gets little processor time
LONGEST = 12  # bytes of a token
ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """Outcome of a grammar.

    Attributes:
        fault: Why it ended its request; "" for a grammar that was served.
        compile_ms: Processor time of its compilation, in milliseconds.
        late_ms: Longest time in which the step's thread did not run while it was compiled, in milliseconds.
        step_ms: Most processor time that a step's thread spent on it, in milliseconds.
        tokens: Tokens that were drawn.
    """

    fault: str
    compile_ms: float
    late_ms: float
    step_ms: float
    tokens: int


class Died(Exception):
    """The process ended, or hung, of a grammar. Says how."""


class Substrings(ByteVocabulary):
    """A vocabulary as wide as a model's: all bytes, and substrings of a text."""

    def __init__(self, size: int) -> None:
        super().__init__()
        chance = random.Random(0)
        content = (Path(model.__file__).parent / "demo" / "tinyshakespeare.txt").read_bytes()
        marks = [
            a + b + c
            for a in (b"", b" ", b"\n")
            for b in (b"{", b"[", b'"', b":", b"}", b",")
            for c in (b"", b'"', b"}")
        ]
        found = dict.fromkeys(marks)
        while len(found) < size - len(self.tokens):
            at = chance.randrange(len(content))
            piece = content[at : at + chance.randint(2, LONGEST)]
            if len(piece) > 1:
                found[piece] = None
        self.tokens = (*self.tokens, *found)


class GrammarEngine:
    """The process. It starts at the first grammar, and again after its end."""

    def __init__(self, vocabulary: int, seconds: float = SECONDS) -> None:
        """Makes it.

        Args:
            vocabulary: Number of tokens.
            seconds: Processor time that a grammar may take.
        """
        self._vocabulary, self._seconds = vocabulary, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def serve(self, grammar: str, short: int | None = None) -> Run:
        """Returns what the grammar did.

        Args:
            grammar: The grammar.
            short: Tokens of a short output; None where none is known.

        Raises:
            Died: The process did not outlive it.
        """
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.grammar_engine", str(self._vocabulary), str(self._seconds)]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.starts += 1
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WAIT, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([grammar, short]).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise Died(f"exit code {self.close()}")
        return Run(*json.loads(answer))

    def close(self) -> int:
        """Ends the process. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr] # ends the process, too
        return process.wait(WAIT)


def main(size: int, seconds: float) -> None:
    """Answers each line, the arguments of `GrammarEngine.serve`, with a `Run`."""
    torch.set_num_threads(1)
    store = GrammarStore(lambda: LLTokenizer(Substrings(size)))  # type: ignore[arg-type] # it has what is asked
    assert store.opened()
    _run(store, 'start: "warm"', None)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := sys.stdin.readline():
        grammar, short = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        made = _run(store, grammar, short)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(made), flush=True)
    store.close()


def _run(store: GrammarStore, grammar: str, short: int | None) -> Run:
    """Does with one grammar as an engine: compiles it beside the steps, then takes it into steps."""
    steps, drawn, chance = [0.0], 0, random.Random(0)
    compiled = late = 0.0
    fault = ""
    try:
        compiled, late = _compile(store, grammar)
        since = time.thread_time()
        closed = {} if short is None else {"grammar_tokens": TOKENS, "grammar_short": short}
        mask = GrammarMask.of(LogitsParams(grammar=grammar, **closed), store)  # type: ignore[arg-type]
        assert mask is not None
        logits = torch.empty(1, store.forcing.words * 32)
        while drawn < TOKENS:
            logits.zero_()
            try:
                apply_masks(logits, np.zeros(1, np.int64), [mask])
            finally:
                steps.append(time.thread_time() - since)
            token = chance.choice(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())
            since = time.thread_time()
            if mask.near:
                token = mask.settled(token)
            if token == ByteVocabulary.eos_token_id:
                break
            mask.drew(token)
            drawn += 1
            for jumped in mask.jump():
                mask.drew(jumped)
                drawn += 1
        steps.append(time.thread_time() - since)
    except RequestFault as error:
        fault = str(error) or "no reason"
    store.await_only(())
    return Run(fault, 1000 * compiled, 1000 * late, 1000 * max(steps), drawn)


def _compile(store: GrammarStore, grammar: str) -> tuple[float, float]:
    """Returns the processor time of the compilation, and the longest time in which this thread did not run, in seconds.

    Raises:
        RequestFault: The grammar cannot be compiled.
    """
    began, last, late = time.process_time(), time.perf_counter(), 0.0
    while not store.ready(grammar, ""):
        time.sleep(0.0002)
        now = time.perf_counter()
        last, late = now, max(late, now - last)
    return time.process_time() - began, late


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
