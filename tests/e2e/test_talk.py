"""`quire chat` in a real terminal, with a model that has a chat template, and with one that has none."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rpc.client import Client
from rpc.paths import demo_directory
from tests.support.server import QUIRE, RunningServer, running_server
from tests.support.terminal import Terminal, running_terminal

TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}:\n{{ message.content }}\n{% endfor %}ASSISTANT:\n"
    "{% if messages[-1].content == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
)
FLAGS = ("--temperature", "0", "--max-tokens", "24")
DONE = r"\[(\d+) prompt tokens \((\d+) cached\), (\d+) generated[^\]]*\]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = Path(shutil.copytree(demo_directory(), tmp_path_factory.mktemp("chat") / "talker"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with running_server("--engine", "thread", "--model", str(directory), "--kv-cache-memory", "8MiB") as running:
        yield running


@contextmanager
def chatting(server: RunningServer, *flags: str) -> Iterator[Terminal]:
    with running_terminal([QUIRE, "chat", "--server", server.address, *flags], columns=200) as terminal:
        terminal.wait_for("> ")
        yield terminal


def said(terminal: Terminal, words: str) -> tuple[str, re.Match[str]]:
    """The answer as the screen has it, and the line below it."""
    since = len(terminal.text)
    terminal.type(words + "\n")
    done = terminal.wait_for(rf"{re.escape(words)}\n(.*?)\n{DONE}\n> ", since)
    return done[1], done


def test_a_conversation_is_that_of_the_api(server: RunningServer) -> None:
    options = {"temperature": 0, "max_tokens": 24}
    with Client(server.address) as client, chatting(server, *FLAGS) as terminal:
        turns: list[dict[str, str]] = []
        for words in ("What light through yonder window breaks?", "Who are you?"):
            answer, line = said(terminal, words)
            turns.append({"role": "user", "content": words})
            result = client.generate(turns, **options)
            assert answer == result.sequences[0].text
            assert [int(line[2]), int(line[4])] == [result.usage.prompt_tokens, result.usage.completion_tokens]
            turns.append({"role": "assistant", "content": answer})
        assert int(line[3]) > 0, "the second turn begins as the first did"
        terminal.type("refuse\n")
        terminal.wait_for("quire: INVALID_ARGUMENT: the model's chat template says: not that")
        terminal.type("/clear\n/system Speak low\n/set max_tokens 5\n")
        terminal.wait_for("max_tokens 5\n> ")
        answer, line = said(terminal, "Who?")
        fresh = [{"role": "system", "content": "Speak low"}, {"role": "user", "content": "Who?"}]
        assert answer == client.generate(fresh, temperature=0, max_tokens=5).sequences[0].text
        terminal.type("/quit\n")
        assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(server: RunningServer) -> None:
    with chatting(server, "--text", "--min-tokens", "1000") as terminal:
        terminal.type("ROMEO:\n")
        terminal.wait_for(r"ROMEO:\n.{200}")
        terminal.type("\x03")
        terminal.wait_for(r"\n\[\d+ generated, [\d.]+ tokens/s, first after \d+ ms, stopped, seed \d+\]\n> ")
        server.wait_for_metric("quire_num_requests_running", 0)
        since = len(terminal.text)
        terminal.type("\x03")
        terminal.wait_for("/quit or Ctrl-D ends\n> ", since)
        # One after the other: what is typed while the program changes the terminal's mode may lose its line's end.
        for typed, shown in (("min_tokens", "min_tokens as the server has it"), ("max_tokens 3", "max_tokens 3")):
            since = len(terminal.text)
            terminal.type(f"/set {typed}\n")
            terminal.wait_for(rf"/set {typed}\n{shown}\n> ", since)
        _, line = said(terminal, "JULIET:")
        assert int(line[2]) > 60, "what there was of the answer is part of the text"
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.text


def test_a_model_without_a_template_says_what_helps() -> None:
    with running_server("--engine", "thread") as server, Client(server.address) as client:
        for flags, why in (
            ((), "the model has no chat template; `quire chat --text` goes on from plain text"),
            (("--text", "--model", "bard"), "model 'bard' is not served here, 'quire-demo' is"),
        ):
            with running_terminal([QUIRE, "chat", "--server", server.address, *flags], columns=200) as terminal:
                assert terminal.wait() == 1, "nothing was typed"
                assert terminal.text == f"quire: {why}\n"
        with chatting(server, "--text", *FLAGS) as terminal:
            first, _ = said(terminal, "ROMEO:")
            second, _ = said(terminal, "JULIET:")
            text = f"ROMEO:{first}\nJULIET:"
            assert second == client.generate(text, temperature=0, max_tokens=24).sequences[0].text


def test_ctrl_c_ends_a_command_that_streams(server: RunningServer) -> None:
    command = [QUIRE, "generate", "ROMEO:", "--server", server.address, "--min-tokens", "1000"]
    with running_terminal(command) as terminal:
        terminal.wait_for("ROMEO:.{200}")
        terminal.type("\x03")
        assert terminal.wait() == 130
        server.wait_for_metric("quire_num_requests_running", 0)
    assert "Traceback" not in terminal.text
