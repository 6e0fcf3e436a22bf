"""The timeline of a recorded request in the dashboard of `quire serve --record --dashboard-port`, in a real browser."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from rpc.cli.main import app
from tests.support.browser import Browser, running_browser
from tests.support.server import RunningServer, running_server, stream_request

SMALL = ("--kv-cache-memory", "600KiB", "--page-size", "4", "--max-batched-tokens", "32", "--max-sequences", "2")
CELLS = """
const rows = [...document.querySelectorAll("#intervals tbody tr")];
return rows.map((row) => [...row.cells].map((cell) => cell.textContent));
"""
EVIL = "<img/src=x/onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def send(server: RunningServer, count: int) -> None:
    """Sends requests at once, of which two have rows at a time."""

    def generate(number: int) -> None:
        request = stream_request(f"{number}. Now is the winter of our discontent. " * 3, 40)
        request.request_id = f"{EVIL}{number}"
        with grpc.insecure_channel(server.address) as channel:
            assert list(server.stub(channel).StreamGenerate(request, timeout=60))

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(generate, range(count)))


def looked(server: RunningServer, path: str) -> dict:
    with urllib.request.urlopen(f"{server.dashboard}{path}", timeout=90) as answer:  # noqa: S310 - our own loopback port
        return json.load(answer)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_page_says_what_quire_explain_says(tmp_path: Path, browser: Browser, engine: str) -> None:
    file = tmp_path / "engine.rec"
    file.write_text("of another run\n")
    with running_server("--engine", engine, "--record", str(file), "--dashboard-port", "0", *SMALL) as server:
        send(server, 6)
        listed = looked(server, "api/recorded")["requests"]
        assert {one["request_id"] for one in listed} == {f"{EVIL}{number}" for number in range(6)}
        place, slowest = max(enumerate(listed), key=lambda one: one[1]["seconds"])
        browser.driver.get(server.dashboard)
        browser.complaints()  # of the page before
        browser.wait(lambda: browser.run("return records.length") == 6, "the list")
        assert browser.run("return records.map((one) => one.attempt)") == [one["attempt"] for one in listed]
        browser.click(f"#records tbody tr:nth-child({place + 1}) button")
        browser.wait(lambda: browser.shown("#intervals"), "the timeline")
        rows = browser.run(CELLS)
        assert rows[0][2] == "queued"
        assert "no row is free" in rows[0][5]
        assert f"behind {EVIL}" in rows[0][5]
        drawn = browser.run("return document.querySelector('#phases').toDataURL()")
        browser.run("timeline.intervals = []; drawPhases(document.querySelector('#phases'), timeline)")
        assert browser.run("return document.querySelector('#phases').toDataURL()") != drawn
        assert browser.driver.title == "Quire"
        assert browser.run("return document.querySelectorAll('#recorded img').length") == 0
        assert browser.complaints() == []
    done = CliRunner().invoke(app, ["explain", f"{file}.1", str(slowest["attempt"]), "--json"])
    (told,) = json.loads(done.stdout)["requests"]
    assert [row[1:4] for row in rows] == [
        [f"{(one['end_ns'] - one['start_ns']) / 1e9:.3f}", one["phase"], str(one["steps"] or "-")]
        for one in told["intervals"]
    ]
    assert f"{told['latency_ns'] / 1e9:.3f} s in the engine" in browser.text("#explained")


def test_a_server_that_records_nothing_has_no_list(browser: Browser) -> None:
    with running_server("--engine", "thread", "--dashboard-port", "0", "--kv-cache-memory", "4MiB") as server:
        browser.driver.get(server.dashboard)
        browser.wait(lambda: browser.text("#status").startswith("up"), "the page")
        assert not browser.shown("#recorded")
