"""Measures the cost of a token in the gateway: streams of chunks over an engine that computes nothing.

Two modes are interleaved: `gateway`, a `quire gateway` whose clients read events from sockets, and `bare`, a grpc.aio
client that reads the same streams and drops them. The server is `bench.stub_engine`, at a fixed pace. CPU time is that
of the whole process of the gateway or the bare client, and is valid on a busy machine too.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer
from grpc import aio

from bench.figures import AsJson, show
from bench.frontend import STREAM, STREAMS_A_CONNECTION, request, running

WARM_UP = 2.0  # seconds
BODY = json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 10**6, "ignore_eos": True, "stop": "\nqqqq", "stream": True})
HEAD = (
    f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
)


@contextmanager
def gateway(server: str) -> Iterator[tuple[psutil.Process, str]]:
    """Starts a gateway, and yields its process and HOST:PORT."""
    command = [str(Path(sys.executable).parent / "quire"), "gateway", "--server", server, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://(\S+)/v1", process.stdout.readline() if process.stdout is not None else "")
        if found is None:
            raise RuntimeError("the gateway does not start")
        yield psutil.Process(process.pid), found[1]
    finally:
        process.kill()
        process.wait()


class Reader:
    """Reads streams through a gateway; counts their events."""

    def __init__(self) -> None:
        self.events = 0

    async def read(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        stream, writer = await asyncio.open_connection(host, int(port))
        writer.write((HEAD + BODY).encode())
        try:
            while data := await stream.read(2**16):
                self.events += data.count(b"data: ")
        finally:
            writer.close()


async def through_gateway(address: str, streams: int, seconds: float) -> float:
    """Returns microseconds of the gateway's CPU time a token. Raises RuntimeError if a stream ends."""
    with gateway(address) as (process, http):
        reader = Reader()
        tasks = [asyncio.create_task(reader.read(http)) for _ in range(streams)]
        await asyncio.sleep(WARM_UP)
        before, first = sum(process.cpu_times()[:2]), reader.events
        await asyncio.sleep(seconds)
        used, tokens = sum(process.cpu_times()[:2]) - before, reader.events - first
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ended or not tokens:
            raise RuntimeError(f"{len(ended)} of {streams} streams ended, {tokens} tokens came")
        return 1e6 * used / tokens


async def read_bare(address: str, streams: int) -> None:
    """Reads streams until killed. Answers each line of its input with the number of messages so far."""
    messages = 0
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options) for _ in range(-(-streams // STREAMS_A_CONNECTION))]

    async def read(channel: aio.Channel) -> None:
        nonlocal messages
        async for _ in channel.unary_stream(STREAM, None, None)(request(1)):
            messages += 1

    tasks = [asyncio.create_task(read(channels[i // STREAMS_A_CONNECTION])) for i in range(streams)]
    asyncio.get_running_loop().add_reader(0, lambda: print(messages if sys.stdin.readline() else 0, flush=True))
    await asyncio.gather(*tasks)


async def bare(address: str, streams: int, seconds: float) -> float:
    """Returns microseconds of CPU time a token of a client that drops the messages it reads."""
    command = [sys.executable, "-m", "bench.gateway", "read", address, str(streams)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        process = psutil.Process(child.pid)

        def count() -> int:
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("pipes were asked for")
            child.stdin.write("\n")
            return int(child.stdout.readline())

        await asyncio.sleep(WARM_UP + 1)
        before, first = sum(process.cpu_times()[:2]), count()
        await asyncio.sleep(seconds)
        return 1e6 * (sum(process.cpu_times()[:2]) - before) / (count() - first)
    finally:
        child.kill()
        child.wait()


async def measure(streams: int, rate: float, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {"bare": [], "gateway": []}
    for _ in range(rounds):
        with running("served", rate) as server:
            found["bare"].append(await bare(server.address, streams, seconds))
        with running("served", rate) as server:
            found["gateway"].append(await through_gateway(server.address, streams, seconds))
    us = {name: median(values) for name, values in found.items()}
    return {
        name: {"us_per_token": value, "ratio": value / us["bare"], "tokens_per_core_second": 1e6 / value}
        for name, value in us.items()
    }


def main(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 64,
    rate: Annotated[float, typer.Option(min=1, help="Tokens a second of each.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each mode; medians are reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a window.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure the gateway's own cost."""
    figures = asyncio.run(measure(streams, rate, rounds, seconds))
    show(f"Gateway: {streams} streams of {rate:g} tokens/s, medians of {rounds}", figures, as_json)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["read", address, count]:
            asyncio.run(read_bare(address, int(count)))
        case _:
            typer.run(main)
