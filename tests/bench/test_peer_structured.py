"""Structured output beside other engines: what is asked, what counts as valid, and the tables."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import byte_pairs, shapes
from bench.peers.as_gguf import convert
from bench.peers.models import make_for_text
from bench.peers.structured import END, Asked, Sizes, is_valid, parse, timings, turns, validities, warming
from bench.peers.structured_report import Figure, StructuredRun, report
from bench.peers.worker import Trace, check
from bench.peers.workloads import FREE, build, schema_of, structured
from bench.schemas import VARIED
from tests.bench.test_peers import TINY

SIZES = Sizes(requests=2, tokens=8, firsts=2, outputs=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Returns a tokenizer of one token a byte, behind the one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte_pairs.END: END} | {byte: i for i, byte in enumerate(alphabet, 1)}, []))
    made.add_special_tokens([byte_pairs.END])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize("schema", [FREE, *VARIED])
def test_a_seed_says_what_is_asked(schema: str) -> None:
    name = structured(schema, 3, 8, 1)
    assert build(name, 5) == build(name, 5)
    first, second = build(name, 5), build(name, 6)
    assert first.requests[0].prompt != second.requests[0].prompt, "a cache would answer it"
    assert len({asked.seed for asked in first.requests}) == first.together == 3
    assert {asked.schema for asked in first.requests} == {"" if schema == FREE else json.dumps(VARIED[schema](1))}


@pytest.mark.parametrize("schema", VARIED)
def test_each_number_is_another_grammar(schema: str) -> None:
    made = {json.dumps(schema_of(structured(schema, 1, 8, number))) for number in range(5)}
    assert len(made) == 5
    endless = schema_of(structured(schema, 1, 8))
    assert endless == {"type": "array", "minItems": 1000, "items": VARIED[schema](0)}


def test_tokens_that_are_missing_are_an_error() -> None:
    free, bound = (build(structured(schema, 1, 4, 0), 0) for schema in (FREE, "labels"))
    some, all_of_them = Trace([0.5] * 3, [1] * 3), Trace([0.5] * 4, [1] * 4)
    check(free, [all_of_them])
    check(bound, [all_of_them])
    check(bound, [some])
    wrong = (
        (free, [some]), (free, [all_of_them] * 2),
        (bound, []), (bound, [Trace()]), (bound, [Trace([0.5] * 5, [1] * 5)]),
    )  # fmt: skip
    for workload, traces in wrong:
        with pytest.raises(RuntimeError, match="were asked for"):
            check(workload, traces)


def test_an_output_is_valid_by_its_whole_text(tokenizer: Tokenizer) -> None:
    schema = VARIED["record"](3)

    def valid(text: str, *more: int) -> bool:
        return is_valid([*tokenizer.encode(text).ids, *more], schema, tokenizer)

    whole = json.dumps({"name": "Zoë", "age": 7, "email": "b@x.org", "note_3": ""}, ensure_ascii=False)
    assert valid(whole)
    assert valid(whole, END)
    assert not valid(whole[:-1])
    assert not valid(whole.replace("note_3", "note_4"))
    assert not valid(whole.replace("b@x.org", "nowhere")), "formats count"
    assert not valid("")


def test_figures_of_an_answer(tokenizer: Tokenizer) -> None:
    answer = {"seconds": 2.0, "times": [[0.25, 1.0, 2.0], [1.5]], "ids": [[1, 2, 3], [4]]}
    workload = structured("choice", 2, 64, 5)
    values = {one: Asked(one, "choice", workload).value(answer, tokenizer) for one in Figure}
    assert values[Figure.TOGETHER] == values[Figure.ALONE] == 2.0
    assert values[Figure.NEW] == values[Figure.KNOWN] == 250.0
    assert values[Figure.VALID_LONG] == values[Figure.VALID_SHORT] == 0.0
    whole = tokenizer.encode('"category number 5-17"').ids
    answer["ids"] = [whole, whole[:-1]]
    assert Asked(Figure.VALID_SHORT, "choice", workload).value(answer, tokenizer) == 0.5


def test_a_new_grammar_was_never_asked_for_and_is_known_thereafter() -> None:
    """Over three rounds, warming and the rates' own grammars included."""
    seen = {json.dumps(schema_of(name)) for name in warming()}
    seen |= {json.dumps(schema_of(asked.workload)) for asked in validities(SIZES)}
    for number in range(1, 4):
        for asked in timings(number, SIZES):
            schema = json.dumps(schema_of(asked.workload))
            assert (schema in seen) == (asked.figure is not Figure.NEW)
            seen.add(schema)
    counts = [asked.figure for asked in timings(0, SIZES)]
    assert counts.count(Figure.NEW) == counts.count(Figure.KNOWN) == 2 * len(VARIED)
    assert counts.count(Figure.TOGETHER) == counts.count(Figure.ALONE) == 1 + len(VARIED)
    assert len(validities(SIZES)) == 2 * len(VARIED)


def test_sizes_that_the_command_line_leaves_out_are_the_usual_ones() -> None:
    args = parse([])
    assert Sizes(args.requests, args.tokens, args.firsts, args.outputs) == Sizes()


class StubSide:
    """A side whose requests get a token each after a quarter of a second."""

    version = "1"

    def __init__(self, name: str, log: list[tuple[str, int]], dies_after: int = 99) -> None:
        self.name, self.asked, self.closed = name, list[str](), False
        self._log, self._left = log, dies_after

    def answers(self, asked: Sequence[str]) -> tuple[list[dict[str, Any]], float]:
        if self._left == 0:
            raise RuntimeError(f"{self.name}: no answer")
        self._left -= 1
        self.asked += asked
        self._log.append((self.name, len(asked)))
        counts = [int(line.split(",")[1]) for line in asked]
        return [{"seconds": 0.5, "times": [[0.25]] * n, "ids": [[END]] * n} for n in counts], 0.125

    def close(self) -> None:
        self.closed = True


def test_sides_take_turns_and_one_that_dies_is_left_out(tokenizer: Tokenizer) -> None:
    log = list[tuple[str, int]]()
    sides = [StubSide("a", log), StubSide("b", log, dies_after=3)]
    made = list(turns(sides, 2, SIZES, tokenizer))
    warm, timed, checked = len(warming()), len(timings(0, SIZES)), len(validities(SIZES))
    first = [("a", warm), ("a", checked), ("b", warm), ("b", checked)]
    assert log == [*first, ("b", timed), ("a", timed), ("a", timed)], "every other round has the reverse order"
    assert [(runs[0].engine, runs[0].round) for runs in made] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2)]
    assert [side.closed for side in sides] == [False, True]
    assert len(set(sides[0].asked)) == len(sides[0].asked), "a prefix cache would answer one"
    assert sides[1].asked == sides[0].asked[: len(sides[1].asked)], "all are asked the same"
    assert {run.others for runs in made for run in runs} == {0.125}


def test_without_outputs_to_check_the_first_round_is_timed(tokenizer: Tokenizer) -> None:
    log = list[tuple[str, int]]()
    sizes = Sizes(outputs=0)
    made = list(turns([StubSide("a", log)], 1, sizes, tokenizer))
    assert log == [("a", len(warming())), ("a", len(timings(1, sizes)))]
    assert [runs[0].round for runs in made] == [1]


def test_tables_have_medians_and_ratios_within_a_round() -> None:
    rates = {"Quire": ((100.0, 90.0), (50.0, 40.0), (200.0, 100.0)), "other": ((10.0, 5.0),)}
    runs = [
        StructuredRun(engine, "2", number, schema, Figure.TOGETHER, rate, 0.01 + number / 100)
        for engine, rounds in rates.items()
        for number, pair in enumerate(rounds)
        for schema, rate in zip((FREE, "tools"), pair, strict=True)
    ]
    for figure, value in ((Figure.NEW, 30.0), (Figure.NEW, 34.0), (Figure.KNOWN, 1.5), (Figure.VALID_SHORT, 0.25)):
        runs.append(StructuredRun("Quire", "2", 0, "tools", figure, value, 0.01))
    runs.append(StructuredRun("Quire", "2", 9, "tools", Figure.VALID_SHORT, 0.25, 0.9))
    told = report(runs).splitlines()
    assert "| tokens a second, several at once | Quire (2) | other (2) |" in told
    assert "| free | 100.0 | 10.0 |" in told
    assert "| tools | 90.0 (80%) | 5.0 (50%) |" in told
    assert "| tools | 32.0, 1.5 | -, - |" in told
    assert "| tools | -, 25% | -, - |" in told
    assert told[-1] == "others' share of the machine: median 2%, most 3%"
    again = [StructuredRun(**json.loads(json.dumps(run.as_dict()))) for run in runs]
    assert report(again).splitlines() == told, "figures come back from a file"


@pytest.fixture
def for_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    monkeypatch.setattr(byte_pairs, "CORPUS", 2**17)
    return make_for_text(tmp_path, "tiny", "float32")


def test_a_file_for_llama_cpp_has_the_same_tokens(for_text: Path, tmp_path: Path) -> None:
    convert(for_text, tmp_path / "tiny.gguf")
    fields = GGUFReader(tmp_path / "tiny.gguf").fields
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    vocabulary = Tokenizer.from_file(str(for_text / "tokenizer.json")).get_vocab()
    assert len(tokens) == TINY["vocab_size"] > len(vocabulary) > 300
    assert all(tokens[token] == text for text, token in vocabulary.items())
    assert tokens[END] == byte_pairs.END
    assert [place for place, kind in enumerate(kinds) if kind == 3] == [END], "control tokens"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == END


@pytest.mark.slow
def test_quire_answers_within_a_schema(for_text: Path) -> None:
    command = [sys.executable, "-m", "bench.peers.quire_engine", str(for_text), "8192"]
    names = [structured("labels", 3, 96, 0), structured("labels", 3, 96), structured(FREE, 1, 8)]
    asked = "".join(f"{name} 1\n" for name in names)
    run = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    _, whole, endless, free = map(json.loads, run.stdout.splitlines())
    tokenizer = Tokenizer.from_file(str(for_text / "tokenizer.json"))
    assert Asked(Figure.VALID_LONG, "labels", names[0]).value(whole, tokenizer) == 1.0
    assert [len(ids) for ids in endless["ids"]] == [96] * 3
    assert [len(ids) for ids in free["ids"]] == [8]
