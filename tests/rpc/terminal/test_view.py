"""A snapshot's picture, and the rates that it shows; without a server."""

import io

import numpy as np
import pytest
from quire.v1 import admin_service_pb2 as pb
from rich.console import Console

from rpc.observe.rates import Rates, rates
from rpc.services.load import duration
from rpc.terminal.snapshot import Snapshot
from rpc.terminal.view import picture


def load(seconds: float, **totals: int) -> pb.Load:
    waited = totals.pop("waited_ms", 0) / 1000
    return pb.Load(uptime=duration(seconds), first_token_time_total=duration(waited), **totals)


def snapshot(**changes: object) -> Snapshot:
    state = load(75, request_count=12, generation_tokens_total=54321, ended_requests_total=99)
    for number in range(2):
        one = state.replicas.add(number=number, epoch=1 + number, running=4, waiting=3, pages_total=100, pages_used=25)
        one.state, one.pages_cached, one.place = pb.REPLICA_STATE_SERVING, 50, f"process {number}"
    state.tenants.add(tenant="ann", request_count=7, waiting_count=5, tokens=4321)
    requests = pb.ListRequestsResponse(total_count=12)
    requests.requests.add(
        request_id="[bold]x", tenant="ann", state=pb.REQUEST_STATE_QUEUED, age=duration(2.5), prompt_tokens=33
    )
    info = pb.GetServerInfoResponse(model="tiny", architecture="Llama", dtype="bfloat16", device="cpu")
    states = np.array([pb.PAGE_STATE_HELD] * 25 + [pb.PAGE_STATE_CACHED] * 50 + [pb.PAGE_STATE_FREE] * 25, np.uint8)
    known = (None, Rates(1, 100, 50, None, None), Rates(1, 200, 60, 0.0123, 0.5))
    given = {"pages": {0: states, 1: states}, "requests": requests, "rates": known, "load": state, "info": info}
    return Snapshot("127.0.0.1:1", **given | changes)  # type: ignore[arg-type]


def drawn(shown: Snapshot, width: int = 120, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(picture(shown, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_everything_is_there() -> None:
    text = drawn(snapshot())
    for part in (
        "tiny  Llama, bfloat16 on cpu  127.0.0.1:1", "200 tokens/s", "60 tokens/s", "12.3 ms", "50% cached",
        "12 live, 5 waiting, 99 have ended", "up 1 min 15 s; 54,321 tokens generated", "2 engines", "serving",
        "25 held, 50 cached of 100", "process 1", "KV pages of engine 0: 100", "KV pages of engine 1: 100",
        "█" * 25 + "⠿" * 50 + "·" * 25, "4,321", "oldest of 12 requests", "[bold]x", "queued", "2.5 s", "q quits",
    ):  # fmt: skip
        assert part in text, part


def test_what_is_printed_ends_with_its_line_and_waits_for_no_key() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(snapshot(), 120, 40, live=False))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "quits" not in text
    assert text.splitlines()[-1].rstrip().endswith("· free")
    assert text.endswith("\n")


@pytest.mark.parametrize("width", [60, 80, 99, 100, 200])
@pytest.mark.parametrize("height", [30, 50])
def test_it_keeps_to_the_size(width: int, height: int) -> None:
    big = np.full(20_000, pb.PAGE_STATE_HELD, np.uint8)
    lines = drawn(snapshot(pages={0: big}), width, height).splitlines()
    assert max(len(line) for line in lines) <= width
    if height == 50:
        assert len(lines) <= height
    assert "in a cell" in "\n".join(lines)


def test_a_server_that_is_away_is_said_beside_what_was_last_known() -> None:
    text = drawn(snapshot(trouble="no server answers at 127.0.0.1:1", pages={}))
    assert "no server answers at 127.0.0.1:1; trying again" in text
    assert "54,321" in text
    assert "no server answers" in drawn(Snapshot("127.0.0.1:1", trouble="no server answers"))


def test_rates_are_differences_of_totals() -> None:
    before = load(10, generation_tokens_total=100, prompt_tokens_total=1000, first_tokens_total=5, waited_ms=500)
    later = {"generation_tokens_total": 150, "prompt_tokens_total": 1040, "cached_prompt_tokens_total": 10}
    after = load(12, **later, first_tokens_total=7, waited_ms=560)
    assert rates(before, after) == Rates(2.0, 25.0, 20.0, pytest.approx(0.03), 0.25)
    assert rates(after, load(13, **later, first_tokens_total=7, waited_ms=560)) == Rates(1.0, 0, 0, None, None)


def test_another_server_s_totals_are_no_rates() -> None:
    old = load(10, generation_tokens_total=100)
    assert rates(old, load(2)) is None
    assert rates(old, load(11, generation_tokens_total=3)) is None
    assert rates(old, old) is None
