"""Measures goodput, refusals and memory of a server that gets several times what it can serve.

The server's frontend, scheduler and cache manager are the real ones; its engine computes nothing, and a step takes the
time that the shipped profile says. Few rows and long outputs make it serve some 15 requests a second, so that clients
and frontend have processors to spare. The capacity is measured first, with twice as many requests at a time as there
are rows. Then requests come at random, each with an rpc deadline, at factors of that.

python -m bench.overload [--policies deadline,first-come] [--loads 1,2,5] [--json FILE]
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import count, repeat
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import psutil
import typer
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.figures import keep
from bench.overload_rows import Row, ends_a_second, shares, table
from bench.serving import Serving, started
from rpc.client.security import OPEN
from rpc.loadgen.arrivals import arrival_times
from rpc.loadgen.drive import Drive, LoadRun
from rpc.loadgen.native import API, failed
from rpc.loadgen.observation import Observation
from rpc.loadgen.wire import Connections, LoadRequest

MODEL, ROWS = "sim:llama-3.1-8b-h100", 16
PROMPT, OUTPUTS = 128, (75, 225)  # tokens: a request runs for a second on average
DEADLINES = 2.0, 6.0  # seconds, drawn evenly
WORDS = 100, 2000  # token ids of prompts
CAPACITY_SECONDS, CAPACITY_START = 9.0, 3.0
START = DEADLINES[1]  # seconds of a load that do not count: by then the queue is as long as it gets
LOOK_SECONDS = 0.25  # between two looks at the server's memory
MOST_SECONDS = 60.0  # of a request without a deadline
SEED = 1


class Clients:
    """Sends requests over quire.v1 without retries. Lives on one asyncio loop.

    Args:
        address: HOST:PORT of the server.
        deadlines: Whether calls have rpc deadlines.
    """

    def __init__(self, address: str, deadlines: bool) -> None:
        self._address, self._deadlines = address, deadlines
        self._connections = Connections(address, OPEN)

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        """Asks for one answer. Raises Failed."""
        spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[int(word) for word in request.prompt]))
        spec.sampling.seed = request.number
        spec.stopping.max_tokens, spec.stopping.ignore_eos = request.output, True
        with self._connections.lease() as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            seen.sent = time.monotonic()
            seconds = seen.due + deadline_of(request.number) - seen.sent if self._deadlines else MOST_SECONDS
            try:
                answer = await stub.Generate(pb.GenerateRequest(spec=spec), timeout=max(0.0, seconds))
            except grpc.RpcError as error:
                raise failed(error, self._address, API) from None
        seen.tokens, seen.finish = answer.usage.completion_tokens, "length"

    async def close(self) -> None:
        await self._connections.close()


def deadline_of(number: int) -> float:
    """Returns the seconds that a client waits."""
    return float(np.random.default_rng((SEED, number)).uniform(*DEADLINES))


def requests(times: Iterator[float]) -> Iterator[LoadRequest]:
    """Yields requests that come at these times. No two prompts begin alike."""
    for number, at in zip(count(), times, strict=False):
        source = np.random.default_rng((SEED + 1, number))
        words, output = source.integers(*WORDS, PROMPT), int(source.integers(*OUTPUTS, endpoint=True))
        yield LoadRequest(number, words.tolist(), PROMPT, output, at)


def tree_bytes(pid: int) -> int:
    """Returns the resident memory of a process and all below it."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


async def capacity_of(server: Serving) -> float:
    """Returns the requests a second that a server completes when as many wait as run."""
    clients = Clients(server.address, deadlines=False)
    try:
        drive = Drive(clients.send, MOST_SECONDS, scheduled=False)
        run = await drive.run_closed(requests(repeat(0.0)), 2 * ROWS, CAPACITY_SECONDS)
    finally:
        await clients.close()
    return ends_a_second(run, (CAPACITY_START, CAPACITY_SECONDS))


async def offer(server: Serving, rate: float, seconds: float) -> tuple[LoadRun, int]:
    """Sends requests at random times for some seconds. Returns the load, and the most bytes of the server."""
    clients, most = Clients(server.address, deadlines=True), 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, tree_bytes(server.pid))
            await asyncio.sleep(LOOK_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        drive = Drive(clients.send, MOST_SECONDS, scheduled=True)
        run = await drive.run_open(requests(arrival_times(rate, 1.0, SEED)), seconds)
    finally:
        watching.cancel()
        await clients.close()
    return run, most


def main(
    policies: Annotated[str, typer.Option(help="Scheduling policies, each on a server of its own.")] = (
        "deadline,first-come"
    ),
    loads: Annotated[str, typer.Option(help="Rates, as factors of the measured capacity.")] = "1,2,5",
    seconds: Annotated[float, typer.Option(help=f"Of each load that count, after {START:g} s.", min=1)] = 18.0,
    file: Annotated[Path | None, typer.Option("--json", help="Has all rows so far, whenever the run ends.")] = None,
) -> None:
    """Measure a server under overload, with requests that have deadlines.

    Takes about 3.5 minutes. The table is printed after each policy.
    """
    factors, rows, capacity = [float(load) for load in loads.split(",")], list[Row](), 0.0
    for policy in policies.split(","):
        flags = ("--model", MODEL, "--max-sequences", str(ROWS), "--scheduling-policy", policy)
        with started(*flags) as server:
            found = asyncio.run(capacity_of(server))  # of each server: its predictions need requests that ended
            capacity = capacity or found
            say(f"{policy}: {2 * ROWS} clients got {found:.1f} a second; loads are factors of {capacity:.1f}")
            for factor in factors:
                run, memory = asyncio.run(offer(server, factor * capacity, START + seconds))
                rows.append(Row.of(policy, factor, run, (START, START + seconds), factor * capacity, memory))
                kept = [asdict(row) | {"share": share} for row, share in zip(rows, shares(rows), strict=True)]
                keep(file, {"model": MODEL, "rows_of_the_engine": ROWS, "capacity": capacity, "rows": kept})
                say(f"{policy}, load {factor:g}: {rows[-1].goodput:.1f} in time a second; {effort_of(run)}")
        print(f"{table([row for row in rows if row.policy == policy])}\n", flush=True)


def effort_of(run: LoadRun) -> str:
    """Returns how busy and how late the clients were."""
    effort = run.effort
    lag = 1000 * float(np.percentile(effort.lags, 99)) if effort.lags else 0.0
    return f"clients used {effort.loop / max(effort.seconds, 1e-9):.0%} of a core and were {lag:.0f} ms late (p99)"


def say(line: str) -> None:
    """Reports progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
