"""The dashboard of `quire serve --dashboard-port` in a real browser."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rpc.client import Client, Security
from tests.support.browser import Browser, running_browser
from tests.support.checkpoints import write_llama
from tests.support.server import RunningServer, running_server

ANN, OPS = "ann-is-no-operator", "ops-is-an-operator"
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
OWN = {"authorization": f"Bearer {OPS}"}
WORDS = "ROMEO: What light"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"ann {ANN}\nops {OPS} operator\n")
    flags = ("--engine", "thread", "--kv-cache-memory", "8MiB", "--token-file", str(tokens))
    with running_server("--dashboard-port", "0", *flags) as running:
        yield running


def enter(browser: Browser, token: str) -> None:
    browser.type("#token", token)
    browser.click("#login button")


@pytest.fixture
def inside(browser: Browser, server: RunningServer) -> Browser:
    """The page as an operator sees it, also where a test runs alone."""
    if not browser.driver.current_url.startswith(str(server.dashboard)):
        browser.driver.get(server.dashboard)
        browser.wait(lambda: browser.shown("#login"), "the question for a token")
        enter(browser, OPS)
    browser.wait(lambda: browser.shown("#main") and "held" in browser.text(".counts"), "the page map")
    return browser


def answered(browser: Browser, prompt: str, **options: object) -> str:
    """Types it, and waits for the whole answer; its text."""
    ask(browser, prompt, **options)
    browser.wait(lambda: browser.text("#summary"), "a summary")
    return browser.text(".completion")


def ask(browser: Browser, prompt: str, **options: object) -> None:
    browser.type("#prompt", prompt)
    for name, value in options.items():
        browser.type(f"#{name}", str(value))
    browser.click("#send")


def connect(server: RunningServer) -> HTTPConnection:
    return HTTPConnection(server.dashboard.removeprefix("http://").rstrip("/"), timeout=30)


def looked(server: RunningServer, path: str) -> dict[str, Any]:
    connection = connect(server)
    connection.request("GET", path, None, OWN)
    return json.load(connection.getresponse())


def drawn(browser: Browser) -> str:
    """The page map as an image."""
    return str(browser.run("return document.querySelector('.map').toDataURL()"))


def test_an_operator_gets_in_and_nobody_else(browser: Browser, server: RunningServer) -> None:
    browser.driver.get(server.dashboard)
    browser.wait(lambda: browser.shown("#login"), "the question for a token")
    for token, said in (
        ("wrong" * 4, "that is no token of this server"),
        ("wrøng" * 4, "a token is of visible ASCII characters"),
        (ANN, "the token is not an operator's"),
    ):
        enter(browser, token)
        browser.wait(lambda said=said: said in browser.text("#refused"), said)
        assert not browser.shown("#main")
    assert browser.text(".tiles b") == "-"
    enter(browser, OPS)
    browser.wait(lambda: browser.shown("#main") and "held" in browser.text(".counts"), "the page map")
    assert not browser.shown("#login")
    assert "quire-demo: LlamaForCausalLM" in browser.text("#model")


def test_an_answer_is_that_of_the_api(inside: Browser, server: RunningServer) -> None:
    inside.complaints()
    with Client(server.address, Security(OPS)) as client:
        result = client.generate(WORDS, max_tokens=60, temperature=0.8, seed=7)
    assert answered(inside, WORDS, max_tokens=60, temperature=0.8, seed=7) == result.sequences[0].text
    assert f"{result.usage.completion_tokens} generated" in inside.text("#summary")
    assert inside.text("#summary").endswith("seed 7")
    assert inside.run("return document.querySelector('#answer .asked').textContent") == WORDS
    ask(inside, WORDS, max_tokens=5000)
    inside.wait(lambda: "stopping.max_tokens is 5000: at most" in inside.text("#summary"), "the server's own words")
    assert [line for line in inside.complaints() if "400" not in line] == []


def test_an_answer_is_repeated_by_any_seed_of_64_bits(inside: Browser, server: RunningServer) -> None:
    seed = 2**64 - 2**10 - 1  # no number of JavaScript's
    with Client(server.address, Security(OPS)) as client:
        result = client.generate(WORDS, max_tokens=40, temperature=1, seed=seed)
    assert answered(inside, WORDS, max_tokens=40, temperature=1, seed=seed) == result.sequences[0].text
    assert inside.text("#summary").endswith(f"seed {seed}")


def test_the_map_and_the_lists_follow_requests(inside: Browser, server: RunningServer) -> None:
    over = False

    def load(number: int) -> None:
        while not over:
            client.generate(f"{number} JULIET: " * 20, max_tokens=200, ignore_eos=True)

    seen = {drawn(inside)}
    with Client(server.address, Security(ANN)) as client, ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load, number) for number in range(3)]
        try:
            inside.wait(lambda: inside.text("#tenants td") == "ann", "the tenant")
            inside.wait(lambda: "ann" in inside.text("#requests tbody"), "the request")
            inside.wait(lambda: not inside.text(".counts").startswith("0 held"), "pages that are held")
            seen.add(drawn(inside))
            inside.wait(lambda: drawn(inside) not in seen, "more pages")
        finally:
            over = True
        for one in loads:
            one.result()
    inside.wait(lambda: inside.text(".counts").startswith("0 held"), "pages to be let go")
    assert " 0 cached" not in inside.text(".counts")
    inside.wait(lambda: drawn(inside) not in seen, "the end in the map")
    assert inside.text("#ttft") != "-"
    assert inside.run("return Math.max(...rates.map((one) => one.generated))") > 0


@contextmanager
def shown_as(browser: Browser, width: int, scheme: str) -> Iterator[None]:
    """In a window of this width, on a system that prefers this colour scheme."""
    sizes = {"width": width, "height": 1250, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
    preferred = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})
    try:
        yield
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [320, 420, 920, 990, 1280])
def test_nothing_stands_out_of_its_tile_or_of_the_window(inside: Browser, width: int) -> None:
    with shown_as(inside, width, "dark"):
        wide = """
            const sample = { generated: "123,456", prompted: "1,234,567", ttft: "12,345", live: "1,234",
              waiting: "1,234", cached: "100 %" };
            for (const [id, text] of Object.entries(sample)) document.getElementById(id).textContent = text;
            const boxes = document.querySelectorAll("html, .tile, .tile p, .options, .buttons");
            return [...boxes].filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.outerHTML);
        """
        assert inside.run(wide) == []


PAINT = """
const [values, scheme] = arguments, canvas = document.createElement("canvas");
canvas.className = "chart";
document.body.append(canvas);
chart(canvas, [[values, "ttft"]]);
const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
canvas.remove();
const ttft = [1, 3, 5].map((at) => Number.parseInt(styled("ttft").slice(at, at + 2), 16));
const found = new Set();
for (let i = 0; i < drawn.length; i += 4) {
  // The line's colour, the shade below it, and their blends with nothing: not the grey of axes and figures.
  if (drawn[i + 3] && ttft.every((part, at) => Math.abs(part - drawn[i + at]) < 12)) found.add((i / 4) % canvas.width);
}
return [canvas.width, [...found].sort((a, b) => a - b)];
"""


def test_no_line_leads_over_seconds_in_which_nothing_came(inside: Browser) -> None:
    """The chart's 300 seconds are 100 with values, 100 without, one alone, 49 without, and 50 with."""
    busy, idle = [0.5, 1.0] * 25, [None] * 50
    width, painted = inside.run(PAINT, [*busy, *busy, *idle, *idle, 1.0, *idle[1:], *busy])
    seconds = {round(299 - (width - 2 - x) * 299 / (width - 46)) for x in painted}
    assert {*range(3, 98), *range(252, 298), 200} <= seconds
    assert not seconds & {*range(103, 198), *range(203, 248)}, "a line over idle time"


LOOKS = """
const canvas = document.createElement("canvas"), counts = document.createElement("p");
canvas.className = "map";
document.body.append(canvas, counts);
const drawn = ["....", "..#.", "..#."].map((states) => {
  showPages({ number: 99 }, { states, page_size: 16 }, canvas, counts);
  const size = Math.min(HIGHEST, canvas.height);
  const pixel = (page) => [...canvas.getContext("2d").getImageData(page * size + 2, 2, 1, 1).data.slice(0, 3)];
  return [pixel(1), pixel(2)];
});
canvas.remove();
counts.remove();
maps.delete(99);
return drawn;
"""


@pytest.mark.parametrize(("scheme", "brighter"), [("dark", True), ("light", False)])
def test_a_page_that_changed_stands_out_until_the_next_look(inside: Browser, scheme: str, brighter: bool) -> None:
    with shown_as(inside, 1280, scheme):
        (free, _), (still_free, changed), (_, settled) = inside.run(LOOKS)
    assert free == still_free
    assert changed != settled
    assert (sum(changed) > sum(settled)) is brighter


def test_colours_follow_the_system(inside: Browser) -> None:
    """Text is readable in both schemes, by WCAG's ratio, and the canvases have the style sheet's colours."""
    contrasts = """
        const light = (rgb) => rgb.map((part) => part / 255)
          .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
          .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
        const parsed = (name) => light([1, 3, 5].map((at) => Number.parseInt(styled(name).slice(at, at + 2), 16)));
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const pairs = arguments[0].flatMap((name) => ["back", "card"].map((below) => [name, below]));
        return Object.fromEntries(pairs.map((pair) => [pair.join(" on "), ratio(...pair.map(parsed))]));
    """
    lit = "return getComputedStyle(document.body).backgroundColor"
    maps = dict[str, list[int]]()
    for scheme, back in (("dark", "rgb(13, 17, 23)"), ("light", "rgb(246, 248, 250)")):
        with shown_as(inside, 1280, scheme):
            assert inside.run(lit) == back
            text = inside.run(contrasts, ["text", "dim", "held", "wrong", "pending"])
            assert min(text.values()) >= 4.5, text
            lines = inside.run(contrasts, ["cached", "ttft"])
            assert min(lines.values()) >= 3, lines
            inside.run("maps.clear()")
            states = "map(document.querySelector('.map'), 'o'.repeat(99) + '.', 'o'.repeat(99) + '.')"
            painted = (
                f"{states}; const [x] = document.querySelector('.map').getContext('2d').getImageData(2, 2, 1, 1).data"
            )
            maps[scheme] = inside.run(f"{painted}; return [x, Number.parseInt(styled('cached').slice(1, 3), 16)]")
            assert maps[scheme][0] == maps[scheme][1]
    assert maps["dark"] != maps["light"]


@pytest.mark.slow
def test_stop_frees_the_pages_and_what_was_typed_is_the_operator_s(inside: Browser, server: RunningServer) -> None:
    def long(seed: int) -> bool:
        return client.generate(prompt, max_tokens=800, temperature=1, seed=seed).usage.completion_tokens == 800

    prompt = "NURSE: " * 30
    with Client(server.address, Security(OPS)) as client:
        seeds = list(islice(filter(long, count()), 3))
    for seed in seeds:  # an answer may be whole before the click
        ask(inside, prompt, max_tokens=800, temperature=1, seed=seed)
        inside.wait(lambda: len(inside.text(".completion")) > 60, "some of the answer")
        inside.click("#stop")
        inside.wait(lambda: inside.text("#summary"), "the end")
        if inside.text("#summary") == "stopped":
            break
    assert inside.text("#summary") == "stopped"
    server.wait_for_metric("quire_num_requests_running", 0)


def test_a_prompt_counts_for_the_tenant_of_its_token_and_ends_with_its_reader(server: RunningServer) -> None:
    before = server.metrics()["quire_requests_total{cancelled}"]
    body = json.dumps({"prompt": "First Citizen:", "max_tokens": 900, "seed": 1})
    connection = connect(server)
    connection.request("POST", "/api/generate", body, OWN | {"content-type": "application/json"})
    answer = connection.getresponse()
    assert json.loads(answer.readline())["text"]
    state = looked(server, "/api/state")
    assert [one["tenant"] for one in state["load"]["tenants"]] == ["ops"]
    answer.close()
    connection.close()
    server.wait_for_metric("quire_requests_total{cancelled}", before + 1)


def test_what_no_page_of_its_own_has_asked_is_refused(server: RunningServer) -> None:
    prompt = json.dumps({"prompt": "a", "max_tokens": 1})
    typed = OWN | {"content-type": "application/json"}
    for method, path, headers, status in (
        ("GET", "/", {}, 200),
        ("GET", "/dashboard.js", {}, 200),
        ("GET", "/", {"host": "evil.example"}, 403),
        ("GET", "/api/state", {}, 401),
        ("GET", "/api/state", {"authorization": f"Bearer {ANN}"}, 403),
        ("GET", "/api/state", {"cookie": f"authorization=Bearer {OPS}"}, 401),
        ("GET", f"/api/state?authorization=Bearer%20{OPS}", {}, 401),
        ("GET", "/api/state", OWN | {"origin": "http://evil.example"}, 403),
        ("GET", "/api/state?after=-1", OWN, 400),
        ("GET", "/api/pages/7", OWN, 404),
        ("GET", "/api/recorded", {}, 401),
        ("GET", "/api/recorded/1", {}, 401),
        ("GET", "/api/recorded/1", {"authorization": f"Bearer {ANN}"}, 403),
        ("GET", "/api/recorded", OWN | {"origin": "http://evil.example"}, 403),
        ("GET", "/api/recorded", OWN, 404),
        ("GET", "/api/recorded/1", OWN, 404),
        ("GET", "/api/generate", OWN, 405),
        ("GET", "/static/../dashboard.css", OWN, 404),
        ("POST", "/api/generate", typed, 200),
        ("POST", "/api/generate", {"content-type": "application/json"}, 401),
        ("POST", "/api/generate", OWN | {"content-type": "text/plain"}, 415),
        ("POST", "/api/generate", OWN, 415),
        ("POST", "/api/generate", typed | {"origin": "http://evil.example"}, 403),
        ("POST", "/api/state", typed, 405),
    ):
        connection = connect(server)
        connection.request(method, path, prompt if method == "POST" else None, headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (status, True), (method, path, headers)
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        connection.close()


def test_what_a_model_writes_stays_text(browser: Browser, tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "evil")
    tokenizer = Tokenizer(models.WordLevel({f"{EVIL}{i}": i for i in range(320)}, unk_token=f"{EVIL}0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    with running_server("--engine", "thread", "--dashboard-port", "0", "--model", str(directory)) as server:
        browser.driver.get(server.dashboard)
        browser.wait(lambda: browser.shown("#ask"), "the page, which wants no token")
        answer = answered(browser, f"a {EVIL}", max_tokens=20)
        assert answer.count(EVIL) > 1
        assert browser.run("return document.querySelectorAll('#answer script, #answer img').length") == 0
        assert browser.driver.title == "Quire"
        assert json.dumps(EVIL) not in browser.complaints()
        assert server.stop() == 0
        browser.wait(lambda: browser.text("#status").startswith("away"), "the end of the server")
