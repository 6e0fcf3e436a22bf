"""Every command and program on the pages for people runs as it stands, on ports of a network of its own."""

import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image

from rpc.cli.main import app
from rpc.paths import demo_directory
from tests.support import nodes
from tests.support.secrets import write
from tests.support.server import clean_environment

ROOT = Path(__file__).parents[2]
BEFORE = {
    "getting-started": "",
    "guides/clients": "make serve",
    "guides/operating": "make serve",
    "guides/observability": "make serve",
    "guides/tuning": "make serve",
    "guides/security": "",
    "guides/dashboard": "quire serve --model DIR",
    "reference/ports": "make serve",
    "guides/runbook": "make serve",
    "guides/from-vllm": "",
    "guides/simulated-engine": "",
    "guides/your-model": "",
}
"""By page, what its reader has begun; "" where the page says all of it."""
SHARED = {"guides/operating", "guides/observability", "guides/tuning", "reference/ports", "guides/runbook"}
"""Pages that begin with `make serve` and leave its server as it was: they have one for all of them."""
STEP = re.compile(
    r"```(?P<kind>sh|python)\n(?P<block>.*?)```"
    r"|(?<!`)`(?P<command>(?:quire [a-z-]+ |(?:curl|dmesg|openssl|pip|py-spy|ssh|ulimit)\b)[^`]*)`"
    r"|`GET (?P<question>/[^`]+)`",
    re.DOTALL,
)
"""What a page shows: blocks, commands in the middle of sentences (`quire top` alone is a name), and questions to the
dashboard."""
NOT_RUN = ("dmesg", "pip ", "py-spy ", "ssh ", "quire admin cancel ", "quire bench serve")
"""In sentences: what needs rights, a network, another machine, a program that is not ours, a live request, or is shown
below with its flags."""
TYPED = re.compile(r"`(/[a-z]+(?: [^`/]+)?)`")  # what is said to `quire chat`
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SERVERS = ("make serve", "quire serve", "quire gateway", "quire frontend")
READY_SECONDS, SECONDS = 120, 120

pytestmark = pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not() or "-")


class Network:
    """A namespace with a loopback of its own, on which the pages' ports are free."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._directory = name, directory
        self._servers: list[subprocess.Popen] = []
        self.log = directory / "log"

    def _command(self, line: str) -> list[str]:
        return ["ip", "netns", "exec", self._name, "bash", "-ec", line]

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return clean_environment() | {"PATH": path, "COLUMNS": "120"}

    def _place(self, line: str) -> Path:
        return ROOT if line.startswith("make") else self._directory

    def serve(self, line: str) -> None:
        """Starts a server, and returns once that says it is ready. One that had its ports is ended first."""
        if line.startswith("quire serve") and " --port" not in line:
            self.close()
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self._command(f"exec {line}"), stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=self._place(line), env=self._environment, start_new_session=True,
            )  # fmt: skip
        self._servers.append(process)
        assert process.stdout is not None
        deadline, said = time.monotonic() + READY_SECONDS, ""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while "ready:" not in said:
                assert selector.select(max(0.0, deadline - time.monotonic())), f"{line}: not ready; {said}"
                piece = process.stdout.readline()
                assert piece, f"{line}: it ended; {said}{self.log.read_text()}"
                said += piece

    def run(self, line: str, typed: str = "") -> str:
        done = subprocess.run(
            self._command(line), input=typed, capture_output=True, text=True, cwd=self._place(line),
            env=self._environment, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def program(self, text: str) -> str:
        path = self._directory / "program.py"
        path.write_text(text)
        return self.run(f"python {path}")

    def close(self, begun: int = 0) -> None:
        """Ends all servers but the first ones. begun: number of those."""
        ending = self._servers[begun:]
        for process in ending:
            process.terminate()
        for process in ending:
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()
        del self._servers[begun:]


@contextmanager
def network(directory: Path, name: str) -> Iterator[Network]:
    name = f"q{name}{os.getpid()}"
    nodes.ip("netns", "add", name)
    try:
        nodes.ip("-n", name, "link", "set", "lo", "up")
        made = Network(name, directory)
        try:
            yield made
        finally:
            made.close()
    finally:
        nodes.ip("netns", "del", name)


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in (line.split("  #")[0].strip() for line in lines) if line and not line.startswith("#")]


def things(directory: Path) -> None:
    """Makes the files that the pages expect their reader to have."""
    model = Path(shutil.copytree(demo_directory(), directory / "DIR"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    Image.new("RGB", (8, 8)).save(directory / "picture.png")
    write(directory / "FILE", b"t" * 32)


def conversation(page: str) -> str:
    """All that the page says can be typed into one."""
    said = [line for line in TYPED.findall(page) if line != "/quit"]
    return "\n".join(["/set max_tokens 20", "Hello", *said, "Hello again", "/quit\n"])


def check_conversation(answers: str, page: str) -> None:
    """Each line was understood, though a wrong one would not end it."""
    assert not re.search(r"^(there is no (/|option )|quire: )", answers, re.MULTILINE), answers
    assert answers.count(" generated, ") == 2, answers
    for name, value in re.findall(r"`/(?:set )?(temperature|seed) ([\d.]+)`", page):
        assert f"\n{name} {value}\n" in answers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A network in which `make serve` runs."""
    directory = tmp_path_factory.mktemp("served")
    things(directory)
    with network(directory, "serve") as place:
        place.serve("make serve")
        yield place


@pytest.mark.parametrize("page", sorted(SHARED))
@pytest.mark.slow
def test_a_page_beside_a_server_runs_from_its_first_line_to_its_last(page: str, served: Network) -> None:
    assert BEFORE[page] == "make serve"
    run_page(page, served)
    served.close(begun=1)


@pytest.mark.parametrize("page", sorted(BEFORE.keys() - SHARED))
@pytest.mark.slow
def test_a_page_runs_from_its_first_line_to_its_last(page: str, tmp_path: Path) -> None:
    things(tmp_path)
    with network(tmp_path, "docs") as place:
        if BEFORE[page]:
            place.serve(BEFORE[page])
        run_page(page, place)


def run_page(page: str, place: Network) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for kind, what in steps(text):
        if kind == "python":
            assert place.program(what)
        elif what.startswith(SERVERS):
            place.serve(what)
        elif what == "quire chat":
            check_conversation(place.run(what, conversation(text)), text)
        else:
            place.run(what)


def steps(text: str) -> list[tuple[str, str]]:
    """Returns the programs in Python and the command lines of a page, in its order."""
    found: list[tuple[str, str]] = []
    for step in STEP.finditer(text):
        if step["kind"] == "python":
            found.append(("python", step["block"]))
        elif step["block"]:
            found += [("sh", line) for line in commands(step["block"]) if line != ". .venv/bin/activate"]
        elif step["question"]:
            path = step["question"].replace("=N", "=0").replace("ENGINE", "0")
            found.append(("sh", f"curl -sf 'http://127.0.0.1:9465{path}'"))
        elif not (line := " ".join(step["command"].split())).startswith(NOT_RUN):
            found.append(("sh", line))
    assert found
    return found


def test_the_pages_are_a_site_without_broken_links(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = list((ROOT / "docs").rglob("*.md"))
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in pages} - {Path("index")}
    assert {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("*/index.html")} == written
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


OTHERS_FLAGS = {"reference/ports", "guides/clients", "guides/from-vllm"}
FLAGS_ALONE = {
    "benchmarks", "explanation/cache", "explanation/exactness", "explanation/failure", "explanation/kernels",
    "explanation/scheduling", "guides/chat-and-images", "guides/flight-recorder", "guides/load-testing",
    "guides/openai", "guides/ray", "guides/sampling", "guides/several-engines",
}  # fmt: skip
"""Pages whose commands are not run here, but whose flags exist."""


@pytest.mark.parametrize("page", sorted(BEFORE.keys() - OTHERS_FLAGS | FLAGS_ALONE))
def test_flags_that_a_page_names_exist(page: str) -> None:
    """On the others some are of other programs."""
    known = set(flags_below(typer.main.get_command(app)))
    named = re.findall(r"`(?:quire [^`]*)?(--[a-z][a-z-]+)", (ROOT / "docs" / f"{page}.md").read_text())
    assert named
    assert set(named) <= known


def flags_below(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from flags_below(inner)
