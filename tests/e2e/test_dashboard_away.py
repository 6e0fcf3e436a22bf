"""The dashboard of `quire serve` where a server ends, or a part of it does not answer, in a real browser."""

import json
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.browser import Browser, running_browser
from tests.support.processes import wait_until
from tests.support.server import RunningServer, running_server

SMALL = ("--kv-cache-memory", "4MiB")
# The browser's own fetch, with paths that answer as a server that is away, in trouble or stuck does.
FAILING = """
window.really ??= window.fetch;
const [start, how] = arguments;
window.fetch = (path, options) => {
  if (!path.startsWith(start)) return window.really(path, options);
  if (how === "503") return Promise.resolve(new Response('{"error": {"message": "it is busy"}}', { status: 503 }));
  if (how === "away") return Promise.reject(new TypeError("held up"));
  return new Promise((_, reject) => options.signal?.addEventListener("abort", () => reject(options.signal.reason)));
};
"""
IMPATIENT = "const real = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = (ms) => real(ms / 20);"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def two_engines() -> Iterator[RunningServer]:
    with running_server("--dashboard-port", "0", "--replicas", "2", *SMALL) as running:
        yield running


def opened(browser: Browser, server: RunningServer) -> None:
    browser.driver.get(server.dashboard)
    browser.wait(lambda: browser.text("#status").startswith("up"), "the page")


def newest(server: RunningServer) -> int:
    """The number of its newest rates."""
    with urllib.request.urlopen(f"{server.dashboard}api/state", timeout=30) as answer:  # noqa: S310 - our own loopback port
        rates = json.load(answer)["rates"]
    return rates[-1]["number"] if rates else 0


@pytest.mark.slow
def test_a_server_that_was_started_anew_is_shown_from_its_first_second(browser: Browser) -> None:
    one = ("--engine", "thread", *SMALL)
    with running_server("--dashboard-port", "0", *one) as first:
        opened(browser, first)
        browser.type("#max_tokens", "200")
        browser.type("#prompt", "ROMEO:")
        browser.click("#send")
        generated = "return Math.max(0, ...rates.map((one) => one.generated))"
        browser.wait(
            lambda: browser.run(generated) > 0 and browser.run("return rates.length") > 5, "rates of the first"
        )
        # A tab in the background looks seldom: it may miss the new server's first seconds.
        browser.run(FAILING, "api/", "away")
        known = browser.run("return rates.length")
    with running_server("--dashboard-port", str(urlsplit(first.dashboard).port), *one) as second:
        wait_until(lambda: newest(second) > known // 2 + 1, "as many seconds of the second as the page cannot explain")
        assert newest(second) < browser.run("return rates.at(-1).number")
        browser.run("window.fetch = window.really")
        browser.wait(lambda: browser.text("#status").startswith("up"), "the second server")
        assert browser.run(generated) == 0, "the first server's figures, as if they were the second's"
        assert browser.run("return rates[0].number") == 1
        assert browser.text("#generated") == "0"


@pytest.mark.slow
def test_an_engine_that_gives_no_map_takes_nothing_else_with_it(browser: Browser, two_engines: RunningServer) -> None:
    opened(browser, two_engines)
    cards = [f".engine:nth-child({place}) " for place in (1, 2)]
    for card in cards:
        browser.wait(lambda card=card: "held" in browser.text(card + ".counts"), "both maps")
    browser.run(FAILING, "api/pages/0", "503")
    browser.wait(
        lambda: browser.text(cards[0] + ".counts") == "no page map: it is busy", "what is wrong, at its engine"
    )
    assert not browser.shown(cards[0] + ".map"), "an old map, as if it were of now"
    browser.run("document.querySelector(arguments[0]).textContent = ''", cards[1] + ".counts")
    browser.wait(lambda: "held" in browser.text(cards[1] + ".counts"), "the other engine's next map")
    assert browser.text("#status").startswith("up")
    browser.run("window.fetch = window.really")
    browser.wait(
        lambda: browser.shown(cards[0] + ".map") and "held" in browser.text(cards[0] + ".counts"), "both again"
    )


@pytest.mark.parametrize(("path", "said"), [("api/state", "#status"), ("api/pages/1", ".engine:nth-child(2) .counts")])
@pytest.mark.slow
def test_an_answer_that_never_comes_is_given_up(
    browser: Browser, two_engines: RunningServer, path: str, said: str
) -> None:
    opened(browser, two_engines)
    browser.run(IMPATIENT)
    browser.run(FAILING, path, "never")
    browser.wait(lambda: browser.text(said).endswith("no answer within 10 s"), "that there is none")
    if path != "api/state":
        assert browser.text("#status").startswith("up")
    browser.run("window.fetch = window.really")
    browser.wait(lambda: "no answer" not in browser.text(said), "the next look")
    assert browser.text("#status").startswith("up")
