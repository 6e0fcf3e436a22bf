"""Every command and program on the pages for people runs as it stands, on ports of a network of its own."""

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import nodes
from tests.support.server import clean_environment

ROOT = Path(__file__).parents[2]
PAGES = ("quickstart", "clients", "operating", "tuning")
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)
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

    def serve(self, line: str) -> None:
        """Returns once it says that it is ready."""
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self._command(f"exec {line}"), stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env=self._environment, start_new_session=True,
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

    def run(self, line: str) -> str:
        done = subprocess.run(
            self._command(line), capture_output=True, text=True, cwd=ROOT, env=self._environment, timeout=SECONDS
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def program(self, text: str) -> str:
        path = self._directory / "program.py"
        path.write_text(text)
        return self.run(f"python {path}")

    def close(self) -> None:
        for process in self._servers:
            process.terminate()
        for process in self._servers:
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def network(directory: Path) -> Iterator[Network]:
    name = f"qdocs{os.getpid()}"
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_its_first_line_to_its_last(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert blocks
    with network(tmp_path) as place:
        if page != "quickstart":
            place.serve("make serve")  # as these pages say at their beginning
        for kind, block in blocks:
            if kind == "python":
                assert place.program(block)
                continue
            for line in commands(block):
                if line.startswith(SERVERS):
                    place.serve(line)
                elif line != ". .venv/bin/activate":  # what it does, this does
                    place.run(line)


def test_the_pages_are_a_site_without_broken_links(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written = {path.name.removesuffix(".md") for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} == written
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
