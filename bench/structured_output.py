"""Measures structured output: what a mask and a grammar take, and a batch whose rows all have a JSON schema.

The tokenizer is a BPE as large as the model's vocabulary, trained on the sources of Python's standard library, since
the time of a mask depends on the tokens. Weights are random, so that a constrained row draws all that its schema
allows.

`mask` and `advance` are of one row and one token: which tokens may follow, and the matcher's step. `completion` is a
search for the end of an output, as some tokens near `max_tokens` need one. `compile` is what an engine does with a
grammar that it has not seen, `check` what the frontend's process does before, `start` what a request costs whose
grammar is known. Each library of structured output that is installed has a table of these. A table of steps has the
masks of 16 rows, by the number of threads that compute them. `first` is the time to the first token of one request,
on two layers of the model: those of more would hide what a constraint adds. In the batch 16 requests of 32 tokens get
256 tokens each, all of them free and all of them with a schema in turn.

python -m bench.structured_output [--model qwen3-0.6b] [--rounds 3] [--part batch]
"""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Annotated, TypeVar

import numpy as np
import typer
from llguidance import LLMatcher, LLTokenizer

from bench.byte_pairs import write_tokenizer
from bench.figures import AsJson, show
from bench.first_token import first_tokens
from bench.schemas import LABELLED, LABELS, RECORDS, tags, tool
from bench.shapes import MODELS, write_model
from model.inputs.completion import Completions
from model.inputs.grammar_backends import BACKENDS, LLGUIDANCE, MARK
from model.inputs.grammar_checker import GrammarChecker
from model.inputs.grammars import limits
from model.inputs.matcher import Matcher
from model.inputs.tag_grammar import grammar_of_any
from model.structured.compiled_grammar import MOST_COMPILED
from model.structured.forcing import Bits, Forcing
from model.structured.grammar_store import SECONDS
from model.structured.mask_threads import MaskThreads
from model.structured.vocabulary import load_vocabulary
from rpc.offline.llm import LLM
from scheduler.parameters import Sampling, Stopping
from scheduler.structured import Structured

T = TypeVar("T")

END = 0
ROWS, PROMPT, NEW = 16, 32, 256
WALKS, LONGEST = 20, 200  # random outputs of each constraint, and their tokens
STEPS = 200
FIRSTS, FIRST_LAYERS, SHORT = 25, 2, 64
MEANS = {"median": median, "mean": mean}


class Part(StrEnum):
    """Parts of the measurement."""

    ROW = "row"
    FORCED = "forced"
    STEP = "step"
    FIRST = "first"
    BATCH = "batch"


CONSTRAINTS = {
    "ten tools": Structured.json_schema({"anyOf": [tool(f"search_{number}") for number in range(10)]}),
    "records": Structured.json_schema(RECORDS),
    "any JSON object": Structured.json_object(),
    "regex": Structured.regex(r"[A-Za-z ]{1,80}: [0-9]{1,6}(\.[0-9]{2})? (EUR|USD)"),
    "choice of 100": Structured.choice([f"category number {number}" for number in range(100)]),
    "ten tags": Structured.structural_tag(tags([f"search_{number}" for number in range(10)])),
}


CALL = {
    "query": "cheap flights to Lisbon", "limit": 10, "sort": "price", "tags": ["travel", "air"],
    "range": {"from": "2026-01-02", "to": "2026-02-03"},
}  # fmt: skip
PEOPLE = [{"name": "Ann Lee", "age": 31, "email": "ann@example.com"}, {"name": "Bob", "age": 7, "email": "b@x.org"}]
OUTPUTS = {
    "a call of ten tools": (CONSTRAINTS["ten tools"], json.dumps({"name": "search_3", "arguments": CALL})),
    "records": (Structured.json_schema(RECORDS | {"minItems": 20}), json.dumps(PEOPLE * 10)),
    "four labels": (Structured.json_schema(LABELLED), json.dumps(dict.fromkeys(LABELS, "high"))),
    "choice of 100": (CONSTRAINTS["choice of 100"], "category number 17"),
}
"""Constraints, and texts as models write them."""


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Calls; returns the result and the seconds."""
    began = time.perf_counter()
    made = call()
    return made, time.perf_counter() - began


def keeps(backend: str, structured: Structured) -> bool:
    """Returns whether a library keeps a constraint."""
    if backend == LLGUIDANCE:
        return True
    from model.inputs.with_xgrammar import grammars

    return grammars.serves(structured.kind, structured.text)


def compiler_of(backend: str, structured: Structured, vocabulary: LLTokenizer) -> Callable[[], Matcher]:
    """Returns what compiles a constraint by a library, which has read the vocabulary."""
    grammar = grammar_of_any(structured.kind, structured.text)
    if backend == LLGUIDANCE:
        return lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    from model.inputs.with_xgrammar import grammars
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

    compiler, rules = XGrammarCompiler(vocabulary), grammars.grammar_of(structured.kind, structured.text)
    return lambda: compiler.matcher(rules.removeprefix(MARK))


def of_one_row(structured: Structured, vocabulary: LLTokenizer, width: int, backend: str) -> dict[str, float]:
    """Walks through random outputs. Returns microseconds and milliseconds."""
    rng, compiler = random.Random(0), compiler_of(backend, structured, vocabulary)
    masks, advances, bits = list[float](), list[float](), np.empty((width + 31) // 32, np.int32)
    completions, ways = Completions(vocabulary, SECONDS), list[float]()
    first, compiled = timed(compiler)
    first_mask = timed(lambda: first.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes))[1]
    starts = [timed(first.deep_copy)[1] for _ in range(20)]
    for _ in range(WALKS):
        matcher = first.deep_copy()
        for number in range(LONGEST):
            if number % 20 == 0:
                begun = matcher.deep_copy()  # a matcher may keep the mask that a search asks for
                ways.append(timed(lambda m=begun: completions.find(m, LONGEST))[1])  # type: ignore[misc]
            masks.append(timed(lambda m=matcher: m.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes))[1])  # type: ignore[misc]
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if matcher.is_stopped() or not len(allowed):
                break
            token = int(rng.choice(allowed))
            advances.append(timed(lambda m=matcher, t=token: m.consume_token(t))[1])  # type: ignore[misc]
            if matcher.is_stopped():
                break
    checker = GrammarChecker(backend)
    try:
        checker.grammar(Structured.regex("a"), "")
        checked = timed(lambda: checker.grammar(structured, ""))[1]
    finally:
        checker.close()
    return {
        "mask_median_us": 1e6 * median(masks),
        "mask_p99_us": 1e6 * float(np.percentile(masks, 99)),
        "mask_most_us": 1e6 * max(masks),
        "advance_median_us": 1e6 * median(advances),
        "completion_median_ms": 1e3 * median(ways),
        "completion_most_ms": 1e3 * max(ways),
        "check_ms": 1e3 * checked,
        "compile_ms": 1e3 * compiled,
        "first_mask_ms": 1e3 * first_mask,
        "start_us": 1e6 * median(starts),
    }


def forced(structured: Structured, text: str, vocabulary: LLTokenizer, forcing: Forcing) -> dict[str, float]:
    """Counts the tokens of an output that are put in without a step. The others are those that a model prefers."""
    matcher = LLMatcher(vocabulary, grammar_of_any(structured.kind, structured.text), log_level=0, limits=limits())
    left, count, jumped = text.encode(), 0, 0
    while left:
        bits = forcing.mask(matcher)
        found = forcing.tokens(matcher, bits, 1, float("inf"))
        preferred = (vocabulary.tokenize_bytes(left[:size])[0] for size in (200, *range(20, 0, -1)))
        token = found[0] if found else next(one for one in preferred if (forcing.alone(one) & bits).any())
        if not matcher.consume_token(token):
            raise ValueError(f"{text!r} is not in the language")
        left = left[len(vocabulary.decode_bytes([token])) :]
        count, jumped = count + 1, jumped + len(found)
    return {"tokens": count, "forced": jumped, "forced_part": jumped / count}


def of_a_step(structured: Structured, vocabulary: LLTokenizer, forcing: Forcing) -> dict[str, float]:
    """Walks 16 rows through random outputs. Returns milliseconds of a step by number of threads.

    `all` are those of all masks, `late` those of what is done where masks may wait for draws among all tokens.
    """
    rng, compiler = random.Random(2), compiler_of(LLGUIDANCE, structured, vocabulary)
    counts = [number for number in (1, 2, 4, 8, 16) if number <= len(os.sched_getaffinity(0))]
    pools = {number: MaskThreads(number) for number in counts}
    firsts = [compiler() for _ in range(min(counts[-1], MOST_COMPILED))]  # as `CompiledGrammar` has
    locks = [i % len(firsts) for i in range(ROWS)]
    rows = [firsts[lock].deep_copy() for lock in locks]
    steps: dict[str, list[float]] = {}

    def masks(pool: MaskThreads, copies: list[LLMatcher], drawn: list[int] | None) -> list[Bits]:
        waited = [drawn is not None and forcing.is_free(one) for one in copies]
        needed = [i for i in range(ROWS) if not waited[i] or copies[i].validate_tokens([drawn[i]]) != 1]  # type: ignore[index] # drawn
        return pool.map(forcing.mask, [copies[i] for i in needed], [locks[i] for i in needed])

    for _ in range(STEPS):
        drawn = [rng.randrange(vocabulary.vocab_size) for _ in rows]
        for number, pool in pools.items():
            for what, draws in ("late", drawn), ("all", None):
                copies = [row.deep_copy() for row in rows]  # a matcher may keep the mask that it has computed
                found, seconds = timed(lambda p=pool, them=copies, d=draws: masks(p, them, d))  # type: ignore[misc]
                steps.setdefault(f"{what}_ms_{number}_threads", []).append(1e3 * seconds)
        for i, mask in enumerate(found):  # of all
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed) or not rows[i].consume_token(int(rng.choice(allowed))) or rows[i].is_stopped():
                rows[i] = firsts[locks[i]].deep_copy()
    for pool in pools.values():
        pool.close()
    return {f"{name}_{what}": call(times) for what, times in steps.items() for name, call in MEANS.items()}


def of_a_batch(llm: LLM, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns output tokens a second of free and of constrained batches, in turns."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1, width) for _ in range(PROMPT)] for _ in range(ROWS)]
    sampling = [Sampling(temperature=1.0, seed=row) for row in range(ROWS)]
    rates: dict[str, list[float]] = {"free": [], "all rows with a schema": []}
    for number in range(rounds + 1):
        for side, found in rates.items():
            structured = None if side == "free" else CONSTRAINTS["records"]
            stopping = Stopping(max_tokens=NEW, ignore_eos=structured is None)
            results, seconds = timed(
                lambda s=structured, until=stopping: llm.generate(
                    prompts, sampling, until, structured=s, use_tqdm=False
                )  # type: ignore[misc]
            )
            if number:  # the first round compiles kernels and grammar
                found.append(sum(len(one.token_ids) for one in results) / seconds)
    return {side: {"tokens_per_s": median(found)} for side, found in rates.items()}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3-0.6b",
    rounds: Annotated[int, typer.Option(help="Batches of each side.")] = 3,
    parts: Annotated[list[Part] | None, typer.Option("--part", help="A part that is measured; all without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure masks, grammars, and a batch in which every row has a schema."""
    width, measured = MODELS[model]["vocab_size"], set(parts or Part)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tokenizer(directory, width)
        write_model(directory, MODELS[model] | {"eos_token_id": END})
        vocabulary, seconds = timed(lambda: load_vocabulary(directory, width, (END,)))
        for backend in (name for name in BACKENDS if Part.ROW in measured and find_spec(name) is not None):
            rows = {
                name: of_one_row(structured, vocabulary, width, backend)
                for name, structured in CONSTRAINTS.items()
                if keeps(backend, structured)
            }
            show(f"{backend}, one row, {width:,} tokens; vocabulary read in {seconds:.2f} s", rows, as_json)
        forcing = Forcing(vocabulary)
        if Part.FORCED in measured:
            counts = {name: forced(*output, vocabulary, forcing) for name, output in OUTPUTS.items()}
            show("Forced tokens of written outputs", counts, as_json)
        if Part.STEP in measured:
            steps = {name: of_a_step(structured, vocabulary, forcing) for name, structured in CONSTRAINTS.items()}
            show(f"{LLGUIDANCE}, masks of {ROWS} rows", steps, as_json)
        if Part.FIRST in measured:
            (short := directory / "short").mkdir()
            for file in directory.glob("tokenizer*"):
                shutil.copy(file, short)
            write_model(short, MODELS[model] | {"eos_token_id": END, "num_hidden_layers": FIRST_LAYERS})
            for new in (NEW, SHORT):  # an output that is not closed yet, and one that is from its first token on
                firsts = first_tokens(str(short), width, CONSTRAINTS, FIRSTS, PROMPT, new)
                show(f"{FIRST_LAYERS} layers of {model}, first token of at most {new}", firsts, as_json)
        if Part.BATCH in measured:
            with LLM(str(directory), prefix_cache=False) as llm:
                show(f"{model}, {ROWS} rows of {NEW} tokens", of_a_batch(llm, width, rounds), as_json)


if __name__ == "__main__":
    typer.run(main)
