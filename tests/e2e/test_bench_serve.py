"""`quire bench serve` against real servers: its counts are theirs, and its times those of the schedule."""

import asyncio
import json
import re
import shlex
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc

from rpc.client import Client, Security
from rpc.loadgen.corpus import PROBE_WORDS, plays
from rpc.loadgen.drive import LoadRun
from rpc.loadgen.native import Native
from rpc.loadgen.run import run_load
from rpc.loadgen.settings import LoadSettings
from tests.support.forking import Quire, run_quire
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import RunningServer, clean_environment, running_server

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "load-testing.md"
TOKEN = "bench-" + "b" * 20
PROMPTS, OUTPUTS, ENDED = "quire_prompt_tokens_total", "quire_generation_tokens_total", "quire_requests_total{length}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([server.address]) as running:
        yield running


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "token"
    path.touch(0o600)
    path.write_text(TOKEN)
    return path


@pytest.fixture(scope="module")
def slow(token_file: Path) -> Iterator[RunningServer]:
    """One request at a time, and only for those who have a token."""
    known = token_file.with_name("known")
    known.touch(0o600)
    known.write_text(f"bench {TOKEN}\n")
    with running_server("--max-sequences", "1", "--max-queue-time", "3600", "--token-file", str(known)) as running:
        yield running


def bench(*flags: str, status: int = 0) -> dict:
    done = run_quire("bench", "serve", "--json", "-", *flags, env=clean_environment())
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(done.stdout) if done.stdout else {"said": done.stderr}


def flags_of(protocol: str, server: RunningServer, gateway: RunningGateway) -> list[str]:
    address = f"{gateway.url}/v1" if protocol == "openai" else server.address
    return ["--protocol", protocol, "--server", address, "--model", server.model]


@pytest.mark.parametrize("protocol", ["quire", "inference", "openai"])
def test_counts_are_the_servers(protocol: str, server: RunningServer, gateway: RunningGateway, tmp_path: Path) -> None:
    before = server.metrics()
    plot = ("--plot", str(tmp_path / "load.png")) if protocol == "quire" else ()
    lengths = ("--input-tokens", "20-60", "--output-tokens", "5-30")
    result = bench(*flags_of(protocol, server, gateway), "--requests", "16", "--concurrency", "4", *lengths, *plot)
    after = server.metrics()
    counts = [after[name] - before.get(name, 0) for name in (ENDED, PROMPTS, OUTPUTS)]
    if protocol != "quire":  # one more said how many tokens a word is
        with Client(server.address) as client:
            probe = client.tokenize(" ".join(plays().split()[:PROBE_WORDS]))
        counts = [had - more for had, more in zip(counts, (1, len(probe), 1), strict=True)]
    assert [result[name] for name in ("ok", "input_tokens", "output_tokens")] == counts
    assert (result["ok"], result["failed"], result["short"], result["errors"]) == (16, 0, 0, {})
    assert result["input_tokens"] == pytest.approx(result["input_tokens_asked"], rel=0.3)
    mean = result["prompt_lengths"]["counted"]["mean"]
    assert 16 * mean == pytest.approx(result["input_tokens"], abs=1)
    if protocol == "quire":
        assert result["input_tokens"] == result["input_tokens_asked"]
        check_picture(tmp_path / "load.png")
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 <= result[name]["p50"] <= result[name]["p99"] <= result[name]["max"]
    assert result["ttft_ms"]["mean"] < result["e2e_ms"]["mean"]


@pytest.mark.parametrize("protocol", ["quire", "openai"])
@pytest.mark.slow
def test_the_prefix_cache_answers_only_what_is_repeated(
    protocol: str, server: RunningServer, gateway: RunningGateway
) -> None:
    flags = (*flags_of(protocol, server, gateway), "--requests", "4", "--input-tokens", "100", "--output-tokens", "2")
    first, second = bench(*flags), bench(*flags)
    assert [(one["cached_input_tokens"], one["warnings"]) for one in (first, second)] == [(0, []), (0, [])]
    assert first["load"]["prompt_seed"] != second["load"]["prompt_seed"]
    repeated = bench(*flags, "--prompt-seed", str(first["load"]["prompt_seed"]))
    assert repeated["cached_share"] > 0.8
    assert "came from the server's prefix cache" in repeated["warnings"][0]
    shared = bench(*flags, "--requests", "9", "--shared-prefix", "64", "--warm-up", "1", "--concurrency", "1")
    assert shared["cached_input_tokens"] >= 9 * 48
    assert shared["warnings"] == []


@pytest.mark.parametrize("protocol", ["quire", "inference", "openai"])
def test_what_an_operator_ends_has_failed(protocol: str, server: RunningServer, gateway: RunningGateway) -> None:
    flags = ("--requests", "1", "--input-tokens", "20", "--output-tokens", "900", "--ttft-target", "60")
    command = ["bench", "serve", "--json", "-", *flags_of(protocol, server, gateway), *flags]
    process = Quire(*command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    with grpc.insecure_channel(server.admin) as channel:
        operator = admin_grpc.AdminServiceStub(channel)
        while process.poll() is None:
            for one in operator.ListRequests(admin_pb.ListRequestsRequest(), timeout=30).requests:
                if one.completion_tokens > 1:
                    operator.CancelRequest(admin_pb.CancelRequestRequest(request_id=one.request_id), timeout=30)
                    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    result = json.loads(said)
    assert {code: error["count"] for code, error in result["errors"].items()} == {"ABORTED": 1}
    assert (result["ok"], result["failed"], result["goodput"], result["ttft_ms"]) == (0, 1, 0, {})


def load(server: RunningServer, settings: LoadSettings) -> LoadRun:
    wire = Native(server.address, "", Security(token=TOKEN), ignore_eos=True)
    return asyncio.run(run_load(wire, settings, lambda *_: None, lambda _: None))


@pytest.mark.slow
def test_open_loop_keeps_its_schedule_with_a_server_that_falls_behind(slow: RunningServer) -> None:
    alone = load(slow, LoadSettings(requests=5, concurrency=1, output_tokens="40"))
    took = float(np.median([seen.whole for seen in alone.seen]))
    rate = 4 / took  # four times what it can
    found = load(slow, LoadSettings(requests=30, rate=rate, output_tokens="40"))
    assert {(seen.code, seen.message) for seen in [*alone.seen, *found.seen]} == {("", "")}
    last = max(seen.sent for seen in found.seen)
    waiting = [seen for seen in found.seen if seen.sent + seen.whole > last]
    assert len(waiting) > 5, "they are sent though those before have no answer"
    waits = [seen.first or 0.0 for seen in found.seen]
    assert np.mean(waits[-10:]) > 2 * np.mean(waits[:10]), "each waits for all before it"
    assert np.mean(waits[-10:]) > 5 * took


def test_too_many_errors_are_a_failure(slow: RunningServer, token_file: Path) -> None:
    flags = ("--server", slow.address, "--token-file", str(token_file), "--requests", "12", "--concurrency", "12")
    some = ("--timeout", "0.8", "--output-tokens", "120")
    result = bench(*flags, *some, "--max-error-rate", "0", status=1)
    assert set(result["errors"]) == {"TIMEOUT"}
    assert result["failed"] + result["ok"] == 12
    bench(*flags, "--output-tokens", "2", "--max-error-rate", "0")
    nobody = bench("--server", slow.address, "--requests", "2", status=1)
    assert "UNAUTHENTICATED" in nobody["said"]


def test_ctrl_c_shows_what_there_is(server: RunningServer, tmp_path: Path) -> None:
    command = ["bench", "serve", "--server", server.address, "--duration", "60", "--output-tokens", "8"]
    before = server.metrics()[ENDED]
    process = Quire(*command, "--json", str(tmp_path / "a"), stdout=subprocess.PIPE, text=True, env=clean_environment())
    server.wait_until(lambda metrics: metrics[ENDED] > before + 20, True)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Output tokens/s" in said
    result = json.loads((tmp_path / "a").read_text())
    assert result["ok"] > 20
    assert result["failed"] == 0


@pytest.mark.slow
def test_commands_of_the_documentation_work(server: RunningServer, gateway: RunningGateway, tmp_path: Path) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 5
    for i, line in enumerate(commands):
        _, _, _, *flags = shlex.split(line.replace("http://127.0.0.1:8000", gateway.url))
        if "--server" not in flags:
            flags += ["--server", server.address]
        if "--json" not in flags:
            flags += ["--json", str(tmp_path / f"{i}.json")]
        done = run_quire("bench", "serve", *flags, env=clean_environment(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        assert "TTFT" in done.stdout
    exact = json.loads((tmp_path / "4.json").read_text())
    assert exact["input_tokens"] == exact["input_tokens_asked"] == exact["ok"] * 128, "with its tokenizer"
    assert json.loads((tmp_path / "load.json").read_text())["ok"] == 20
    check_page(tmp_path / "load.html")


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(2**20) or []) > 20, "something is drawn"


def check_page(path: Path) -> None:
    page = path.read_text()
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    namespace = "{http://www.w3.org/2000/svg}"
    drawn = ET.fromstring(svg)  # noqa: S314 - our own
    assert drawn.tag == namespace + "svg"
    assert len(list(drawn.iter(namespace + "path"))) > 20
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "href")), "nothing outside it"
    assert "<td>TTFT</td>" in page
    assert "Output tokens/s" in page
