"""A constraint that means harm costs its request alone: refused in bounded time, by a process that may die."""

import json
import os
import signal
import threading

import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer

from model.inputs import grammar_checker, line_process
from model.inputs.grammar_checker import GrammarChecker, GrammarUnchecked
from model.inputs.grammars import GrammarRefused, grammar_of, limits
from model.inputs.line_process import LineProcess
from scheduler.structured import Structured
from tests.support.checkpoints import byte_tokenizer
from tests.support.grammar_engine import GrammarEngine
from tests.support.processes import is_alive, wait_until

MODULE = "model.inputs.grammar_process"


@pytest.fixture
def checker():
    made = GrammarChecker()
    yield made
    made.close()
    assert processes() == []


def processes() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if is_alive(c) and MODULE in c.cmdline()]


def serves(checker: GrammarChecker, text: str = "fine") -> bool:
    """A pattern that it has not seen."""
    return text in checker.grammar(Structured.regex(text), "t").grammar


def nested(depth: int, key: str = "items") -> str:
    return f'{{"{key}": ' * depth + "{}" + "}" * depth


def wide(depth: int) -> dict:
    return {"anyOf": [wide(depth - 1), wide(depth - 1), {"type": "null"}]} if depth else {"type": "string"}


HOSTILE = {
    "deep schema": Structured("json_schema", nested(100_000)),
    "deep schema that parses": Structured("json_schema", nested(400)),
    "deep not": Structured("json_schema", nested(900, "not")),
    "cyclic references": Structured.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "wide references": Structured.json_schema({"$ref": "#/$defs/a0", "$defs": {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{(i * k + 1) % 400}"} for k in range(9)]} for i in range(400)
    }}),
    "wide choices": Structured.json_schema(wide(11)),
    "many properties": Structured.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "many values": Structured.json_schema({"enum": [f"value {i}" for i in range(20_000)]}),
    "many texts": Structured.choice([f"text {i}" for i in range(20_000)]),
    "long array": Structured.json_schema({"type": "array", "minItems": 10**12}),
    "nested arrays": Structured.json_schema(
        {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    "long text": Structured.json_schema({"type": "string", "minLength": 10**9}),
    "huge bound": Structured.json_schema({"type": "integer", "minimum": -(10**400), "maximum": 10**400}),
    "tiny step": Structured.json_schema({"type": "number", "multipleOf": 1e-300}),
    "products of patterns": Structured.json_schema(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(10, 30)]}),
    "nested repetition": Structured.regex("((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
    "exponential states": Structured.regex("(a|b)*a(a|b){25}(c|a|b)*b(a|b|c){25}"),
    "backtracking": Structured.regex("(a+)+b(a+)+b(a*)*c"),
    "all letters": Structured.regex(r"(\w{1,500}\W{1,500}){1,500}"),
    "deep regex": Structured.regex("(" * 60_000 + ")" * 60_000),
    "deep grammar": Structured.grammar("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "ambiguous grammar": Structured.grammar("start: " + " | ".join(["start start"] * 300) + ' | "a"'),
    "empty rules": Structured.grammar("start: a a a a\na: b b b b\nb: c c c c\nc: start? start? start?"),
    "no grammar": Structured.grammar("\x00\x01\x7f" * 1000),
    "options of the library": Structured.grammar('%llguidance {"no_such": 1}\nstart: "a"'),
    "JSON in a grammar": Structured.grammar("start: %json " + nested(200)),
}  # fmt: skip


VOCABULARY = LLTokenizer(byte_tokenizer().to_str(), n_vocab=320, eos_token=0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_answered_in_bounded_time_and_the_next_one_too(checker: GrammarChecker, name: str) -> None:
    """Bounded by processor time: a process that takes more is ended by the kernel. An engine can use what is taken."""
    said = ""
    try:
        grammar = checker.grammar(HOSTILE[name], "t")
    except GrammarRefused as refused:
        said = str(refused)
    else:
        matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
        assert matcher.compute_bitmask() or matcher.is_error()
    assert len(said) <= 300, "it quotes no more"
    assert serves(checker)


@pytest.mark.slow
def test_many_of_them_are_refused(checker: GrammarChecker) -> None:
    refused = 0
    for structured in HOSTILE.values():
        try:
            checker.grammar(structured, "t")
        except GrammarRefused:
            refused += 1
    assert refused >= len(HOSTILE) // 3


@pytest.mark.parametrize("schema", [
    {"properties": {"x" * 100_000: {"minProperties": 9}}},
    {"x" * 100_000: 1e300},
    json.loads(nested(100, "additionalProperties").replace("{}", '{"minProperties": 9}')),
])  # fmt: skip
def test_a_refusal_ends_with_its_reason_whatever_the_names_before_it(checker: GrammarChecker, schema: dict) -> None:
    """A frontend cuts off what is longer."""
    with pytest.raises(GrammarRefused, match=r"can be at most the number|cannot be kept exactly") as refused:
        checker.grammar(Structured.json_schema(schema), "t")
    assert len(str(refused.value)) <= 300


def test_a_schema_that_is_too_deep_for_python_ends_no_process(checker: GrammarChecker) -> None:
    assert serves(checker)
    (process,) = processes()
    with pytest.raises(GrammarRefused, match=r"^it is nested too deeply$"):
        checker.grammar(HOSTILE["deep not"], "t")
    assert processes() == [process]


def test_a_grammar_whose_tokens_take_long_is_refused(checker: GrammarChecker) -> None:
    """Its third token took 0.8 s, for which a step of an engine would wait."""
    with pytest.raises(GrammarRefused, match=r"it is too complex: a token takes more than 50 ms"):
        checker.grammar(HOSTILE["ambiguous grammar"], "t")
    assert serves(checker)


def test_a_schema_that_fails_at_every_first_token_is_refused(checker: GrammarChecker) -> None:
    """Its first mask is within the bounds, what follows that not. In an engine it would end its request."""
    several = {f"p{i}": {"type": "string"} for i in range(1000)}
    with pytest.raises(GrammarRefused, match=r"Current row has \d+ items; max is 2000"):
        checker.grammar(
            Structured.json_schema({"properties": several, "additionalProperties": False, "type": "object"}), "t"
        )
    assert serves(checker)


@pytest.mark.parametrize("text", ['start: "x" /a+/ "ab"', 'start: "x" /(ba)+/ "ba"'])
def test_a_way_that_never_ends_takes_no_step_for_ever(text: str) -> None:
    """After the first letters one byte may follow again and again. The library would look for the end of that."""
    engine = GrammarEngine(300, seconds=3.0)
    try:
        assert engine.serve(grammar_of("grammar", text)).fault == ""
    finally:
        engine.close()


def test_time_is_limited(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "SECONDS", 0.05)
    with pytest.raises(GrammarRefused, match=r"it takes more than 0.05 s to compile"):
        checker.grammar(HOSTILE["many properties"], "t")
    monkeypatch.setattr(grammar_checker, "SECONDS", 10.0)
    assert serves(checker)


def test_memory_is_limited(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MEMORY", 2**29)
    monkeypatch.setattr(grammar_checker, "SECONDS", 100.0)
    monkeypatch.setattr(line_process, "WAIT", 100.0)
    with pytest.raises(GrammarRefused, match=r"too complex|too much memory"):
        checker.grammar(Structured.choice([f"{i}" * 100 for i in range(150_000)]), "t")
    assert serves(checker)


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    assert serves(checker, "one")
    (process,) = processes()
    process.kill()
    wait_until(lambda: not is_alive(process), "its end")
    assert serves(checker, "two")


def test_answers_are_kept_for_their_tenant(checker: GrammarChecker) -> None:
    assert serves(checker)
    (process,) = processes()
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert serves(checker), "without a question"
        done = threading.Event()
        other = threading.Thread(target=lambda: (checker.grammar(Structured.regex("fine"), "another"), done.set()))
        other.start()
        assert not done.wait(0.2), "another tenant's question is asked anew"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    other.join(30)
    assert done.is_set()


def test_no_process_is_started_before_it_is_needed() -> None:
    checker = GrammarChecker()
    assert processes() == []
    checker.close()
    with pytest.raises(RuntimeError, match="closed"):
        checker.grammar(Structured.regex("a"), "t")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_answer_that_was_not_read_is_not_the_next_ones(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    ask = LineProcess.ask

    def interrupted(self: LineProcess, line: str, most: int) -> None:
        ask(self, line, 0)  # reads nothing of the answer
        raise interrupt

    assert serves(checker)
    monkeypatch.setattr(LineProcess, "ask", interrupted)
    with pytest.raises(interrupt):
        checker.grammar(Structured.regex("first"), "t")
    monkeypatch.undo()
    assert serves(checker, "second")
    assert serves(checker, "first")


def test_a_process_that_cannot_start_blames_no_constraint(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "LineProcess", lambda module: LineProcess("model.inputs.no_such_module"))
    with pytest.raises(GrammarUnchecked):
        checker.grammar(Structured.regex("fine"), "t")
    monkeypatch.undo()
    assert serves(checker)


def test_closing_ends_a_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_process, "WAIT", 3600.0)
    checker, failures = GrammarChecker(), list[BaseException]()
    assert serves(checker)
    (process,) = processes()
    os.kill(process.pid, signal.SIGSTOP)

    def ask() -> None:
        try:
            checker.grammar(Structured.regex("b"), "t")
        except (GrammarRefused, RuntimeError) as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED and checker.busy, "its question")
    checker.close()
    thread.join(60)
    assert len(failures) == 1
    assert processes() == []


def test_the_process_ends_with_its_input() -> None:
    process = LineProcess(MODULE)
    assert process.ask(json.dumps({"memory": 2**30, "seconds": 1.0, "backend": "llguidance"}), 2**16) == {}
    assert len(processes()) == 1
    process.close_input()
    wait_until(lambda: processes() == [], "its end")
    process.end()
