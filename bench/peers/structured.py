"""Measures structured output of Quire beside vLLM with xgrammar and llama.cpp's grammars, on this machine's CPU.

python -m bench.peers.structured --peers DIRECTORY [--model llama-135m] [--rounds 3] [--json FILE]

All serve the same checkpoint, random weights in bfloat16 with a byte-level BPE, and the same requests, drawn at
temperature 1. Every engine is started once and kept; then they take turns, round after round, while the others are
stopped. `python -m bench.peers --help` says how to install them in DIRECTORY. Quire has its default library. vLLM is
eager and writes JSON without whitespace, with which a random model would fill its outputs. llama.cpp draws as its
server does.

Schemas are a call of one of ten tools, a record, four labels, one of 100 texts. A turn measures, free and with each
schema:

- tokens a second of some requests at once and of one alone. Here an output is an array of at least 1,000 values of the
  schema, so that none is complete before its last token, and every engine draws as many tokens. The grammar is known.
  Quire does not try to close such outputs in time, which costs others a search of milliseconds;
- the time to the first token of a request alone with a grammar that the engine has not seen, and once more with it.
  Quire's has the frontend's check of the grammar and, as `max_tokens` is 48, the search for an end of the output. None
  of the three has a server before it.

Before the rounds each engine gives outputs of one value, of at most 128 and of at most 48 tokens. The share that is
valid by the schema is counted with jsonschema, one of Quire's `dev` extras, formats included. A figure is the median
over the rounds. A percentage is the median of constrained by free of the same turn. A run that is cut short has its
figures in FILE. So has one of `--rounds 0`, which only checks outputs, beside one of `--outputs 0`, which does not:

    python -m bench.peers.structured_report FILE
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from bench.peers.floor import token_bytes
from bench.peers.models import make_for_text
from bench.peers.sides import Side, start_all
from bench.peers.structured_report import Figure, StructuredRun, report
from bench.peers.workloads import FREE, schema_of, structured
from bench.schemas import VARIED

SIDES = {
    "Quire": Side("quire_engine"),
    "vLLM, xgrammar": Side("vllm_engine", "vllm", arguments=("eager", "xgrammar")),
    "llama.cpp": Side("llama_cpp_engine", "llama", "bf16"),
}
LONG, SHORT = 128, 48  # most tokens of an output whose validity is checked
END = 0
KV_TOKENS = 8192
WIDTHS = {"bfloat16": 1, "float32": 2}  # bytes of an element, in bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        requests: Requests at once.
        tokens: Tokens of an output whose rate is measured.
        firsts: New grammars of each schema in a round.
        outputs: Outputs of each schema whose validity is checked; 0 for no check.
    """

    requests: int = 16
    tokens: int = 32
    firsts: int = 1
    outputs: int = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """A workload, and the figure that its answer gives.

    Attributes:
        figure: The figure.
        schema: Name of the schema, or FREE.
        workload: Name of the workload.
    """

    figure: Figure
    schema: str
    workload: str

    def value(self, answer: dict[str, Any], tokenizer: Tokenizer) -> float:
        """Computes the figure of an answer, see `worker.serve`."""
        times = answer["times"]
        if self.figure in (Figure.TOGETHER, Figure.ALONE):
            return sum(map(len, times)) / answer["seconds"]
        if self.figure in (Figure.NEW, Figure.KNOWN):
            return 1e3 * times[0][0]
        schema = schema_of(self.workload)
        return statistics.mean(is_valid(ids, schema, tokenizer) for ids in answer["ids"])


def is_valid(ids: Sequence[int], schema: Any, tokenizer: Tokenizer) -> bool:
    """Returns whether an output is JSON that a schema accepts, formats included."""
    text = tokenizer.decode([token for token in ids if token != END], skip_special_tokens=False)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value)


def warming() -> list[str]:
    """Returns workloads that make all grammars known whose rates are measured."""
    return [structured(schema, 1, 8) for schema in (FREE, *VARIED)]


def timings(number: int, sizes: Sizes) -> list[Asked]:
    """Returns what is measured in a round. No round has another's new grammars."""
    asked = list[Asked]()
    for schema in (FREE, *VARIED):
        asked.append(Asked(Figure.TOGETHER, schema, structured(schema, sizes.requests, sizes.tokens)))
        asked.append(Asked(Figure.ALONE, schema, structured(schema, 1, sizes.tokens)))
    for schema in VARIED:
        for variant in range(number * sizes.firsts + 1, (number + 1) * sizes.firsts + 1):
            workload = structured(schema, 1, SHORT, variant)  # Quire refuses what no output can keep
            asked += Asked(Figure.NEW, schema, workload), Asked(Figure.KNOWN, schema, workload)
    return asked


def validities(sizes: Sizes) -> list[Asked]:
    """Returns outputs whose validity is checked."""
    lengths = (Figure.VALID_LONG, LONG), (Figure.VALID_SHORT, SHORT)
    return [
        Asked(figure, schema, structured(schema, sizes.outputs, tokens, 0))
        for schema in VARIED
        for figure, tokens in lengths
    ]


class AnsweringSide(Protocol):
    """An engine in a process; see `sides.PeerProcess`."""

    name: str
    version: str

    def answers(self, asked: Sequence[str]) -> tuple[list[dict[str, Any]], float]: ...

    def close(self) -> None: ...


def turns(
    sides: Sequence[AnsweringSide], rounds: int, sizes: Sizes, tokenizer: Tokenizer
) -> Iterator[list[StructuredRun]]:
    """Yields the figures of each turn. Round 0 checks outputs. Every other round has the reverse order.

    A side that dies is left out.
    """
    alive = list(sides)
    checked = [(0, validities(sizes))] if sizes.outputs else []
    plan = [*checked, *((number, timings(number, sizes)) for number in range(1, rounds + 1))]
    for place, (number, asked) in enumerate(plan):
        for side in alive[:: -1 if number % 2 else 1]:
            try:
                if place == 0:
                    side.answers([f"{name} -1" for name in warming()])
                yield turn(side, number, asked, tokenizer)
            except (RuntimeError, OSError) as error:
                print(f"{error}: left out from here on", file=sys.stderr)
                side.close()
                alive.remove(side)


def turn(side: AnsweringSide, number: int, asked: Sequence[Asked], tokenizer: Tokenizer) -> list[StructuredRun]:
    """Asks an engine, and returns the figures of its answers. Raises RuntimeError where it has died."""
    # The seed is the place in the run: a known grammar has another prompt than when it was new.
    lines = [f"{one.workload} {number * len(asked) + place}" for place, one in enumerate(asked)]
    answers, others = side.answers(lines)
    return [
        StructuredRun(side.name, side.version, number, one.schema, one.figure, one.value(answer, tokenizer), others)
        for one, answer in zip(asked, answers, strict=True)
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    usual = Sizes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="see above (default ./%(default)s)")
    parser.add_argument("--model", default="llama-135m", choices=("llama-135m", "qwen3-0.6b"))
    parser.add_argument("--dtype", default="bfloat16", choices=WIDTHS, help="%(default)s without AVX-512: float32")
    parser.add_argument("--engines", nargs="+", default=list(SIDES), choices=SIDES, metavar="ENGINE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=usual.requests, help="requests at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="tokens of each (%(default)s)")
    parser.add_argument("--firsts", type=int, default=usual.firsts, help="new grammars of a round (%(default)s)")
    parser.add_argument("--outputs", type=int, default=usual.outputs, help="outputs checked, or 0 (%(default)s)")
    parser.add_argument("--json", type=Path, help="also add every figure to this file, a line each")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    model = make_for_text(args.peers / "models", args.model, args.dtype)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engines = {name: SIDES[name] for name in args.engines}
    kv_bytes = KV_TOKENS * token_bytes(args.model) * WIDTHS[args.dtype]
    sides = start_all(engines, args.peers, model, KV_TOKENS, kv_bytes)
    if not sides:
        sys.exit("none of the engines has started")
    runs = list[StructuredRun]()
    try:
        for made in turns(sides, args.rounds, Sizes(args.requests, args.tokens, args.firsts, args.outputs), tokenizer):
            runs += made
            print("\n".join(run.line() for run in made), file=sys.stderr, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.writelines(json.dumps(run.as_dict()) + "\n" for run in made)
    finally:
        for side in sides:
            side.close()
    print(report(runs))


if __name__ == "__main__":
    main()
