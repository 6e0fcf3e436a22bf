"""Each row of the page for those who come from vLLM holds of the code."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import typer
from quire import LLM, Beam, Completion, Generated, Output, Sampling, Stopping

from rpc.cli.main import app
from rpc.frontend.output import Finish
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.observe.aliases import register_aliases
from rpc.offline.keywords import CHAT_KEYWORDS, CONSTRUCTOR_KEYWORDS, GENERATE_KEYWORDS
from scheduler.keywords import NOT_HERE
from scheduler.parameters import REQUEST_KEYWORDS
from tests.docs.test_pages import flags_below
from tests.rpc.test_aliases import filled

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guides" / "from-vllm.md").read_text()
REQUEST = {made.__name__: {field.name for field in fields(made)} for made in (Sampling, Stopping, Output)}
PLACES = REQUEST | {
    "Beam": {field.name for field in fields(Beam)},
    "LLM": set(inspect.signature(LLM).parameters),
    "generate": set(inspect.signature(LLM.generate).parameters),
    "chat": set(inspect.signature(LLM.chat).parameters),
}
CALL = re.compile(r"(\w+)\((\w+)=")


def tables(heading: str) -> list[list[tuple[list[str], str]]]:
    """The tables below a heading: by row what the first column names, and the second column."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()[2:]]
        found.append([(re.findall(r"`([^`]+)`", left), right) for left, right in cells])
    assert found
    return found


def rows(heading: str) -> Iterator[tuple[str, str]]:
    for table in tables(heading):
        for names, right in table:
            yield from ((name, right) for name in names)


def check_calls(right: str) -> None:
    for place, field in CALL.findall(right):
        assert field in PLACES[place], right


def check_against_hints(table: list[tuple[list[str], str]], hints: dict[str, str], own: set[str]) -> None:
    """The table and the errors say the same, and the table has all of them."""
    found = {name: right for names, right in table for name in names}
    for name, right in found.items():
        check_calls(right)
        if right.startswith("the same"):
            assert name in own
            assert name not in hints
        else:
            assert set(CALL.findall(hints[name])) <= set(CALL.findall(right)), name
            assert (hints[name] == NOT_HERE) == (right == "Quire does not have it"), name
    assert hints.keys() <= found.keys()


def test_arguments_of_llm() -> None:
    constructor, calls = tables("LLM")
    check_against_hints(constructor, CONSTRUCTOR_KEYWORDS, PLACES["LLM"])
    found = {name: right for names, right in calls for name in names}
    every = CHAT_KEYWORDS | GENERATE_KEYWORDS
    hints = {name: hint for name, hint in every.items() if hint != REQUEST_KEYWORDS.get(name)}
    for name, right in found.items():
        check_calls(right)
        place = PLACES["chat" if right == "the same, of `chat`" else "generate"]
        assert name in (place if right.startswith("the same") else hints)
        assert right.startswith("the same") or (hints[name] == NOT_HERE) == (right == "Quire does not have it"), name
    assert found.keys() >= hints.keys()


def test_sampling_parameters() -> None:
    (table,) = tables("SamplingParams")
    every = set.union(*REQUEST.values())
    for names, right in table:
        if same := re.match(r"the same in `(\w+)`", right):
            assert set(names) <= REQUEST[same[1]]
    changed = [(names, right) for names, right in table if not right.startswith("the same")]
    hints = {name: hint for name, hint in REQUEST_KEYWORDS.items() if name not in every or name in sum_of(changed)}
    check_against_hints(changed, hints, every)


def sum_of(table: list[tuple[list[str], str]]) -> set[str]:
    return {name for names, _ in table for name in names}


def test_results() -> None:
    attributes = {
        made.__name__: {f.name for f in fields(made)} | set(vars(made)) for made in (Completion, Generated, Finish)
    }
    for name, right in rows("Results"):
        if re.fullmatch(r"the same, of `Completion`", right):
            assert name.split(".")[1] in attributes["Completion"]
        elif right.startswith("the same, of `Generated`"):
            assert name.split(".")[1] in attributes["Generated"]
        for place, field in re.findall(r"(Completion|Generated|Finish)\.(\w+)", right):
            assert field in attributes[place]


def test_flags() -> None:
    known = set(flags_below(typer.main.get_command(app).commands["serve"]))  # type: ignore[attr-defined]
    for name, right in rows("Server"):
        assert name in known if right.startswith("the same") else name.startswith("--")
        assert set(re.findall(r"`(--[a-z-]+)`", right)) <= known
    assert {"--port", "--host"} <= set(flags_below(typer.main.get_command(app).commands["gateway"]))  # type: ignore[attr-defined]
    for heading in ("LLM", "HTTP"):
        assert {flag for _, right in rows(heading) for flag in re.findall(r"`(--[a-z-]+)`", right)} <= known


def test_http() -> None:
    paths, asked = tables("HTTP")
    source = "".join(path.read_text() for path in (ROOT / "rpc" / "gateway").glob("*.py"))
    for names, right in paths:
        for name in names:
            elsewhere = "--metrics-port" in right
            assert elsewhere or (f'"{name}"' in source) is right.startswith("the same"), name
    both = CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    of = {"the same": both, "the same, of chats": ChatRequest.model_fields.keys()}
    of["the same, of completions"] = CompletionRequest.model_fields.keys()
    for names, right in asked:
        assert set(names) <= of[right]


def test_metrics() -> None:
    metrics = filled()
    register_aliases(metrics, with_engines=True)
    shown = {metric.name + ("_total" if metric.type == "counter" else "") for metric in metrics.registry.collect()}
    found = dict(rows("Metrics"))
    assert found.keys() == {name for name in shown if name.startswith("vllm:")}
    for right in found.values():
        assert set(re.findall(r"`(quire_\w+)`", right)) <= shown
