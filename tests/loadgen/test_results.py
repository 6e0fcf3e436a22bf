"""Output and files of `quire bench serve`, with a server that is not there."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rpc.cli.main import app
from rpc.loadgen.corpus import Corpus
from rpc.loadgen.observation import Observation
from rpc.loadgen.plan import WARM_UP
from rpc.loadgen.wire import Failed, LoadRequest, ServedModel


class Wire:
    """Answers at once. sending: is called with each request, before its answer. sent: how many there were."""

    def __init__(self, sending: Callable[[LoadRequest], None] = lambda _: None, corpus: Corpus | None = None) -> None:
        self._sending, self._corpus = sending, corpus or Corpus(range(1000))
        self.sent = 0

    async def find(self) -> ServedModel:
        return ServedModel("stub")

    async def corpus(self, text: str) -> Corpus:
        return self._corpus

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        self.sent += 1
        self._sending(request)
        await asyncio.sleep(0)
        seen.sent = time.monotonic()
        seen.times.append(time.monotonic())
        seen.tokens, seen.finish = request.output, "length"

    async def close(self) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def run(wire: Wire, *flags: Any) -> Result:
        monkeypatch.setattr("rpc.loadgen.native.Native", lambda *_: wire)
        return CliRunner().invoke(app, ["bench", "serve", "--requests", "3", *map(str, flags)], env={"COLUMNS": "200"})

    return run


def test_text_of_about_the_length_is_reported_as_what_it_was(serve: Callable[..., Result], tmp_path: Path) -> None:
    wire = Wire(corpus=Corpus(["to", "be"], 1.5))
    done = serve(wire, "--json", tmp_path / "a.json", "--input-tokens", 30)
    assert "asked for 30" in done.stdout
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["prompt_lengths"] == {"asked": {"mean": 30.0, "min": 30, "max": 30}, "counted": None}
    assert "does not count" in result["warnings"][0]


def refused(request: LoadRequest) -> None:
    if request.number in (WARM_UP, WARM_UP + 2):
        raise Failed("UNAVAILABLE", "not yet")


def test_warm_ups_that_fail_are_said(serve: Callable[..., Result], tmp_path: Path) -> None:
    done = serve(Wire(refused), "--warm-up", 3, "--json", tmp_path / "a.json")
    assert done.exit_code == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["ok"], result["failed"]) == (3, 0)
    assert result["warm_up"] == {"requests": 3, "errors": {"UNAVAILABLE": {"count": 2, "message": "not yet"}}}
    (warning,) = result["warnings"]
    assert warning == "2 of 3 requests of the warm-up failed, so it may not be warm: UNAVAILABLE: not yet"
    assert "requests of the warm-up failed" in " ".join(done.stdout.split())


def test_a_load_that_is_stopped_in_its_warm_up_has_measured_nothing(
    serve: Callable[..., Result], tmp_path: Path
) -> None:
    def stop(request: LoadRequest) -> None:
        signal.raise_signal(signal.SIGINT)

    wire = Wire(stop)
    done = serve(wire, "--warm-up", 30, "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    assert done.exit_code == 130
    assert json.loads((tmp_path / "a.json").read_text())["requests"] == 0
    assert wire.sent < 30


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_files_that_cannot_be_written_are_said_before_the_load(
    flag: str, serve: Callable[..., Result], tmp_path: Path
) -> None:
    wire = Wire()
    done = serve(wire, flag, tmp_path / "nowhere" / "a.html")
    assert (done.exit_code, wire.sent) == (1, 0)
    assert f"quire: {flag} {tmp_path}/nowhere/a.html cannot be written: No such file or directory" in done.stderr


def test_the_check_leaves_files_as_they_are(serve: Callable[..., Result], tmp_path: Path) -> None:
    """Until there is something to write."""
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    old.write_text("before")

    def unchanged(_: LoadRequest) -> None:
        assert (old.read_text(), new.exists()) == ("before", False)

    assert serve(Wire(unchanged), "--json", old, "--plot", new).exit_code == 0
    assert json.loads(old.read_text())["ok"] == 3
    assert new.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("lost", "flag"), [("a.json", "--json"), ("a.html", "--plot")])
def test_one_file_that_fails_after_all_keeps_no_other_from_being_written(
    lost: str, flag: str, serve: Callable[..., Result], tmp_path: Path
) -> None:
    done = serve(
        Wire(lambda _: (tmp_path / lost).mkdir(exist_ok=True)),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.html"),
    )
    assert done.exit_code == 1
    assert f"quire: {flag} {tmp_path / lost} cannot be written: Is a directory" in done.stderr
    assert sum(path.is_file() for path in tmp_path.iterdir()) == 1
    assert "Output tokens/s" in done.stdout
