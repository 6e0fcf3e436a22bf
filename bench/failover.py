"""Measures a failover as clients see it: streams over engines with steps of 20 ms, one of which is killed.

    python -m bench.failover --rounds 10 --streams 16

In each round one engine gets SIGKILL while all streams run. Prints the longest time between two messages of any stream
in the second after it. The same figure of the second before shows the machine's own noise. A gap or a duplicate in a
stream ends the benchmark.
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import psutil
import typer
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from bench.link import running
from bench.paced import PERIOD, STREAMS

WARM_UP, WINDOW = 1.0, 1.0  # seconds


@dataclass
class Watched:
    """A stream's messages.

    Attributes:
        arrivals: Time of each message, in seconds of time.monotonic.
        tokens: Number of tokens so far, without a gap.
    """

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0

    def worst(self, start: float, end: float) -> float:
        """Returns the longest wait in seconds for a message that came between `start` and `end`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(later - one for one, later in pairs if start < later <= end)


async def watch(stub: pb_grpc.GenerationServiceStub, number: int, watched: Watched, until: float) -> None:
    spec = pb.GenerationSpec(
        text=f"stream {number}",
        stopping=pb.StoppingCriteria(max_tokens=90_000, ignore_eos=True),
        output=pb.OutputOptions(text=False, token_ids=True),
    )
    call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec))
    async for message in call:
        for delta in message.deltas:
            if delta.first_position != watched.tokens:
                raise RuntimeError(f"stream {number}: {delta.first_position} came where {watched.tokens} was due")
            watched.tokens += len(delta.token_ids)
        watched.arrivals.append(time.monotonic())
        if watched.arrivals[-1] > until:
            break
    call.cancel()


async def one_round(chance: random.Random, count: int, engines: int) -> tuple[float, float]:
    """Returns the longest wait of all streams in the second before the kill, and in the one after it."""
    with running("process", str(engines)) as ids:
        async with aio.insecure_channel(ids["address"], options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub, streams = pb_grpc.GenerationServiceStub(channel), [Watched() for _ in range(count)]
            kill_at = time.monotonic() + WARM_UP + WINDOW + chance.uniform(0, PERIOD)
            watching = [
                asyncio.create_task(watch(stub, number, stream, kill_at + WINDOW))
                for number, stream in enumerate(streams)
            ]
            await asyncio.sleep(kill_at - time.monotonic())
            os.kill(ids["engine"], signal.SIGKILL)
            await asyncio.gather(*watching)
    before = max(stream.worst(kill_at - WINDOW, kill_at) for stream in streams)
    return before, max(stream.worst(kill_at, kill_at + WINDOW) for stream in streams)


def main(
    rounds: Annotated[int, typer.Option(help="Kills.")] = 10,
    streams: Annotated[int, typer.Option(max=STREAMS, help="Over all engines.")] = 16,
    engines: Annotated[int, typer.Option(min=2)] = 2,
    seed: int = 1,
) -> None:
    chance, found = random.Random(seed), list[tuple[float, float]]()
    psutil.cpu_percent()
    for number in range(rounds):
        found.append(asyncio.run(one_round(chance, streams, engines)))
        print(
            f"{number + 1} of {rounds}: {1000 * found[-1][0]:.0f} ms before, {1000 * found[-1][1]:.0f} after",
            flush=True,
        )
    table = Table(f"longest time between two messages of {streams} streams", "median of rounds", "worst")
    for name, gaps in zip(("a second without a death", "the second after one"), zip(*found, strict=True), strict=True):
        table.add_row(name, f"{1000 * median(gaps):.0f} ms", f"{1000 * max(gaps):.0f} ms")
    Console().print(table)
    print(f"{rounds} deaths, steps of {1000 * PERIOD:.0f} ms; the machine was {psutil.cpu_percent():.0f} % busy in all")


if __name__ == "__main__":
    typer.run(main)
