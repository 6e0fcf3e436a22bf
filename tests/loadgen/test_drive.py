"""A load keeps its times, whatever the server does; every request is seen once."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from rpc.cli.bench import progress
from rpc.loadgen.drive import Drive
from rpc.loadgen.observation import INTERRUPTED, Observation, Targets
from rpc.loadgen.summary import summary
from rpc.loadgen.wire import Failed, LoadRequest
from tests.support.virtual_time import in_virtual_time


def requests(count: int, gap: float = 0.0) -> Iterator[LoadRequest]:
    return (LoadRequest(i, [1], 1, 1, i * gap) for i in range(count))


class Server:
    """Answers one request at a time, each with one token after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._turn = seconds, asyncio.Lock()
        self.live = self.peak = 0

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        seen.sent = time.monotonic()
        self.live += 1
        self.peak = max(self.peak, self.live)
        try:
            async with self._turn:
                await asyncio.sleep(self._seconds)
            seen.times.append(time.monotonic())
            seen.tokens += 1
            seen.finish = "length"
        finally:
            self.live -= 1


@in_virtual_time
async def test_open_loop_does_not_wait_for_a_slow_server() -> None:
    fast, slow = [
        await Drive(Server(seconds).send, 60, scheduled=True).run_open(requests(30, 0.01)) for seconds in (0.0, 0.03)
    ]
    for one in (fast, slow):
        due = [seen.due - one.begin for seen in one.seen]
        assert due == pytest.approx([0.01 * i for i in range(30)])
        assert [seen.sent for seen in one.seen] == pytest.approx([seen.due for seen in one.seen])
    assert [seen.first for seen in slow.seen] == pytest.approx([0.03 * (i + 1) - 0.01 * i for i in range(30)])
    middle = [summary(one, Targets())["ttft_ms"]["p50"] for one in (fast, slow)]
    assert middle == pytest.approx([0, 320], abs=10)


@in_virtual_time
async def test_what_a_request_waits_in_the_generator_counts() -> None:
    async def send(request: LoadRequest, seen: Observation) -> None:
        time.sleep(0.1 if request.number == 0 else 0)  # holds up the whole generator
        await Server(0.0).send(request, seen)

    found = await Drive(send, 60, scheduled=True).run_open(requests(5, 0.01))
    result = summary(found, Targets())
    assert found.seen[1].first == pytest.approx(0.09)
    assert result["generator"]["sent_late_ms"]["max"] == pytest.approx(100)
    assert any("ms late" in warning for warning in result["generator"]["warnings"])


@in_virtual_time
async def test_closed_loop_has_so_many_at_a_time_and_waits_for_them() -> None:
    server = Server(0.005)
    found = await Drive(server.send, 60, scheduled=False).run_closed(requests(12), 3)
    assert server.peak == 3
    assert [seen.complete for seen in found.seen] == [True] * 12
    assert max(seen.first or 0.0 for seen in found.seen) == pytest.approx(0.015)


@pytest.mark.parametrize("scheduled", [True, False])
@in_virtual_time
async def test_duration_ends_the_sending_and_not_the_requests(scheduled: bool) -> None:
    drive = Drive(Server(0.02).send, 60, scheduled)
    many = requests(10**6, 0.01)
    found = await (drive.run_open(many, 0.095) if scheduled else drive.run_closed(many, 2, 0.095))
    assert all(seen.complete for seen in found.seen)
    assert len(found.seen) == (10 if scheduled else 6)


@in_virtual_time
async def test_failures_are_counted_by_their_codes() -> None:
    async def send(request: LoadRequest, seen: Observation) -> None:
        if request.number == 1:
            raise Failed("UNAVAILABLE", "gone")
        await asyncio.sleep(60 if request.number == 2 else 0)
        seen.finish = "stop"

    found = await Drive(send, 0.05, scheduled=False).run_closed(requests(4), 2)
    assert [seen.code for seen in found.seen] == ["", "UNAVAILABLE", "TIMEOUT", ""]
    assert summary(found, Targets())["errors"]["UNAVAILABLE"] == {"count": 1, "message": "gone"}


@in_virtual_time
async def test_a_fault_of_the_generator_is_no_failed_request() -> None:
    async def send(request: LoadRequest, seen: Observation) -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        await Drive(send, 60, scheduled=True).run_open(requests(3, 0.01))


@in_virtual_time
async def test_stopping_shows_what_there_is() -> None:
    server = Server(0.02)
    drive = Drive(server.send, 60, scheduled=True)
    asyncio.get_running_loop().call_later(0.2, drive.stop)
    found = await drive.run_open(requests(10**6, 0.01))
    assert found.stopped
    assert server.live == 0
    assert {seen.code for seen in found.seen} == {"", INTERRUPTED}
    result = summary(found, Targets())
    assert result["failed"] == 0
    assert result["ok"] + result["interrupted"] == len(found.seen)


class Unread(list[Observation]):
    """May not be gone through."""

    def __iter__(self) -> Iterator[Observation]:
        raise AssertionError("all requests were looked at")


@in_virtual_time
async def test_progress_is_counted_as_requests_end() -> None:
    """Looking through all of them took 63 ms of the event loop at 500,000, twice a second."""

    async def send(request: LoadRequest, seen: Observation) -> None:
        if request.number == 1:
            raise Failed("UNAVAILABLE", "gone")
        await asyncio.sleep(60 if request.number == 3 else 0)
        seen.tokens, seen.finish = 5, "length"

    drive = Drive(send, 60, scheduled=False)
    asyncio.get_running_loop().call_later(0.2, drive.stop)
    found = await drive.run_closed(requests(4), 4)
    found.seen = Unread(found.seen)
    assert progress(found) == {"completed": 4, "running": 0, "failed": 1, "tokens": 10}
    found.seen.append(Observation(0.0, (1, 1)))
    assert progress(found)["running"] == 1
