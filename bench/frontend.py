"""Measures the cost of a token in the frontend: the real service over a stub engine, one token a message.

Two modes are interleaved. `floor` is a bare grpc.aio servicer that writes ready-made bytes of the same size. `served`
is the public service with its streams, detokenizer, stop strings and metrics. On Linux the server runs on one core, and
the clients on the others.

CPU time a token is that of the server's process but for the stub's thread. It is valid on a busy machine too; rates per
second need a quiet one. The loop wakes up once for the engine's step, and once for each message that gRPC has written.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import psutil
import typer
from grpc import aio
from quire.v1 import generation_service_pb2 as pb

from bench.figures import AsJson, show
from bench.stub_engine import FLOOR

MODES = ("floor", "served")
WARM_UP = 1.0  # seconds
STREAMS_A_CONNECTION = 64
STREAM = f"/{pb.DESCRIPTOR.services_by_name['GenerationService'].full_name}/StreamGenerate"


@dataclass(frozen=True, slots=True)
class FrontendWindow:
    """One window of one mode.

    Attributes:
        seconds: Length of the window.
        messages: Messages that the clients got.
        counts: Counters of the server in the window; see `bench.stub_engine`.
        others: Share of the machine that other processes used.
    """

    seconds: float
    messages: int
    counts: dict[str, float]
    others: float

    @property
    def us(self) -> float:
        """Microseconds of CPU time a token."""
        return 1e6 * self.counts["cpu"] / max(1, self.counts["tokens"])


class StubServer:
    """A running `bench.stub_engine`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None  # noqa: S101 - pipes were asked for
        assert process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = process.stdin, process.stdout
        self.address = self._stdout.readline().strip()

    def counts(self) -> dict[str, float]:
        self._stdin.write("\n")
        self._stdin.flush()
        return json.loads(self._stdout.readline())


@contextmanager
def running(mode: str, rate: float) -> Iterator[StubServer]:
    command = [sys.executable, "-m", "bench.stub_engine", mode, str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with apart_from(process.pid):
            yield StubServer(process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def apart_from(pid: int) -> Iterator[None]:
    """Pins another process to the first core and this one to the rest, on Linux with several cores."""
    if sys.platform != "linux" or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        yield
        return
    os.sched_setaffinity(pid, cores[:1])
    os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class OtherProcesses:
    """Measures the CPU use of other processes since its creation."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._busy()

    def _busy(self) -> float:
        machine = psutil.cpu_times()
        return sum(machine) - machine.idle - machine.iowait - time.process_time()

    def others(self, counts: dict[str, float]) -> float:
        """Returns their share of the machine. `counts` are the server's counters of this time."""
        theirs = self._busy() - self._before - counts["cpu"] - counts["stub"]
        return max(0.0, theirs) / (time.monotonic() - self._began) / (psutil.cpu_count() or 1)


def request(group: int) -> bytes:
    """Returns a request without an end or a match of its stop string, with at least `group` tokens a message."""
    spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1, 2, 3, 4]), stopping=pb.StoppingCriteria(ignore_eos=True))
    spec.stopping.stop.append("\nqqqq")
    options = pb.StreamOptions(min_tokens_per_message=group)
    return pb.StreamGenerateRequest(spec=spec, stream_options=options).SerializeToString()


async def measure(mode: str, streams: int, rate: float, seconds: float, group: int = 1) -> FrontendWindow:
    """Measures one window. Raises RuntimeError if a stream ends."""
    with running(mode, rate) as server:
        async with AsyncExitStack() as stack:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [
                await stack.enter_async_context(aio.insecure_channel(server.address, options))
                for _ in range(-(-streams // STREAMS_A_CONNECTION))
            ]
            return await _measure(server, Readers(mode, channels, streams, request(group)), seconds)


async def measure_all(
    streams: Sequence[int], rate: float, group: int, rounds: int, seconds: float
) -> dict[int, dict[str, float]]:
    """Returns the figures of `report` by number of streams."""
    # On one loop: grpc.aio goes on waking up the loops of earlier runs.
    rows = {}
    for count in streams:
        windows: dict[str, list[FrontendWindow]] = {mode: [] for mode in MODES}
        for _ in range(rounds):
            for mode in MODES:
                windows[mode].append(await measure(mode, count, rate, seconds, group))
        rows[count] = report(windows)
    return rows


class Readers:
    """Clients of all streams, which count their messages."""

    def __init__(self, mode: str, channels: list[aio.Channel], streams: int, request: bytes) -> None:
        self.messages, self._request = 0, request
        method = FLOOR if mode == "floor" else STREAM
        calls = [channels[i // STREAMS_A_CONNECTION].unary_stream(method, None, None) for i in range(streams)]
        self._tasks = [asyncio.create_task(self._read(call)) for call in calls]

    async def _read(self, call: aio.UnaryStreamMultiCallable) -> None:
        async for _ in call(self._request):
            self.messages += 1

    async def leave(self) -> None:
        """Cancels all streams. Raises RuntimeError if one has ended before."""
        ended = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if ended:
            raise RuntimeError(f"{len(ended)} of {len(self._tasks)} streams ended: {ended[0].exception()}")


async def _measure(server: StubServer, readers: Readers, seconds: float) -> FrontendWindow:
    await asyncio.sleep(WARM_UP)
    machine, began, before, first = OtherProcesses(), time.monotonic(), server.counts(), readers.messages
    await asyncio.sleep(seconds)
    took, after, messages = time.monotonic() - began, server.counts(), readers.messages - first
    counts = {key: after[key] - before[key] for key in after}
    window = FrontendWindow(took, messages, counts, machine.others(counts))
    await readers.leave()
    return window


def report(windows: dict[str, list[FrontendWindow]]) -> dict[str, float]:
    floor, ours = windows["floor"], windows["served"]
    us, bare = median(w.us for w in ours), median(w.us for w in floor)
    return {
        "floor_us_per_message": bare,
        "us_per_token": us,
        "ratio": us / bare,
        "tokens_per_core_second": 1e6 / us,
        "tokens_per_second": median(w.counts["tokens"] / w.seconds for w in ours),
        "messages_per_second": median(w.messages / w.seconds for w in ours),
        "tokens_per_message": median(w.counts["tokens"] / max(1, w.messages) for w in ours),
        "loop_turns_per_step": median(w.counts["turns"] / max(1, w.counts["steps"]) for w in ours),
        "wakeups_per_step": median(w.counts["sleeps"] / max(1, w.counts["steps"]) for w in ours),
        "others_share_of_machine": median(w.others for w in floor + ours),
    }


def main(
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent streams; may be given several times.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, help="Steps a second; 0: the next once all tokens are taken.")] = 0,
    group: Annotated[int, typer.Option(min=1, help="Tokens that a message waits for; above 1 with a rate.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each mode; medians are reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a window.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Measure the frontend's own cost: 1, 16, 64 and 256 streams, one token a message.

    Microseconds are CPU time; rates per second need a quiet machine.
    """
    if group > 1 and not rate:
        raise typer.BadParameter("--group above 1 needs a --rate: a step would wait for tokens that wait for it")
    rows = asyncio.run(measure_all(streams or [1, 16, 64, 256], rate, group, rounds, seconds))
    pace = f"{rate:g} steps/s" if rate else "a step as soon as all tokens are taken"
    show(f"Frontend, by streams: {pace}, medians of {rounds}", {str(n): row for n, row in rows.items()}, as_json)


if __name__ == "__main__":
    typer.run(main)
