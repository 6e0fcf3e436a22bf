"""Measures a drain as its streams see it: with a KV transfer, and with recompute, interleaved.

    python -m bench.moves --rounds 5 --streams 16 --prompt 800

Two servers have two engines each. In each round all streams run on one engine of a server, with new prompts, and move
to the other when theirs is drained. Prints the longest time between two messages of a stream after the drain: the
median over the streams, and the worst. The server that recomputes has --no-prefix-cache, so it has no pages to copy. A
gap or a duplicate in a stream ends the benchmark.
"""

import asyncio
import random
import time
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Annotated

import psutil
import typer
from grpc import aio
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from bench.serving import Serving, started

BEFORE, AFTER = 20, 60  # tokens of each stream before the drain, and from then on
FLAGS = ("--replicas", "2", "--kv-cache-memory", "256MiB")
WAYS = {"copied": FLAGS, "recomputed": (*FLAGS, "--no-prefix-cache")}
DIRECT = [("grpc.enable_http_proxy", 0)]
Round = tuple[float, float, float]
"""Median and longest gap in seconds, and number of copied pages."""


async def watch(stub: pb_grpc.GenerationServiceStub, prompt: list[int], arrivals: list[float]) -> None:
    """Reads one stream, and appends the time of each token to `arrivals`."""
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=prompt),
        stopping=pb.StoppingCriteria(max_tokens=BEFORE + AFTER, ignore_eos=True),
        output=pb.OutputOptions(text=False, token_ids=True),
    )
    async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
        for delta in message.deltas:
            if delta.first_position != len(arrivals):
                raise RuntimeError(f"token {delta.first_position} came where {len(arrivals)} was due")
            arrivals.extend([time.monotonic()] * len(delta.token_ids))


async def one_round(serving: Serving, prompts: list[list[int]], source: int) -> Round:
    """Drains engine `source`, on which all streams run, and returns the figures."""
    async with (
        aio.insecure_channel(serving.address, options=DIRECT) as channel,
        aio.insecure_channel(serving.admin, options=DIRECT) as admin_channel,
    ):
        admin = admin_grpc.AdminServiceStub(admin_channel)
        await admin.DrainReplica(admin_pb.DrainReplicaRequest(replica=1 - source))
        before = serving.metrics()["quire_kv_pages_transferred_total"]
        stub, arrivals = pb_grpc.GenerationServiceStub(channel), [list[float]() for _ in prompts]
        watching = [asyncio.create_task(watch(stub, *each)) for each in zip(prompts, arrivals, strict=True)]
        while min(map(len, arrivals)) < BEFORE:
            await asyncio.sleep(0.002)
        await admin.ResumeReplica(admin_pb.ResumeReplicaRequest(replica=1 - source))
        drained = time.monotonic()
        await admin.DrainReplica(admin_pb.DrainReplicaRequest(replica=source))
        await asyncio.gather(*watching)
        await admin.ResumeReplica(admin_pb.ResumeReplicaRequest(replica=source))
    gaps = [max(later - one for one, later in pairwise(times) if later > drained) for times in arrivals]
    return median(gaps), max(gaps), serving.metrics()["quire_kv_pages_transferred_total"] - before


def main(
    rounds: Annotated[int, typer.Option(help="Drains of each server, after one that does not count.")] = 5,
    streams: Annotated[int, typer.Option(help="On the engine that is drained.")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 800,
    seed: int = 1,
) -> None:
    chance, found = random.Random(seed), {way: list[Round]() for way in WAYS}
    with ExitStack() as stack:
        servers = {way: stack.enter_context(started(*flags)) for way, flags in WAYS.items()}
        for number in range(rounds + 1):
            psutil.cpu_percent()
            for way, serving in servers.items():
                prompts = [[chance.randrange(10, 2000) for _ in range(prompt)] for _ in range(streams)]
                one = asyncio.run(one_round(serving, prompts, number % 2))
                print(
                    f"{number}: {way}: {1000 * one[0]:.0f} ms, worst {1000 * one[1]:.0f}, {one[2]:.0f} pages",
                    flush=True,
                )
                if number:  # the first one warms up
                    found[way].append(one)
    title = f"longest time between two messages of {streams} streams x {prompt} tokens after a drain"
    table = Table(title, "median stream", "worst stream", "pages copied")
    for way, of_way in found.items():
        middle, worst, pages = (median(values) for values in zip(*of_way, strict=True))
        table.add_row(way, f"{1000 * middle:.0f} ms", f"{1000 * worst:.0f} ms", f"{pages:.0f}")
    Console().print(table)
    print(
        f"medians of {rounds} rounds; the machine's load is {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores"
    )


if __name__ == "__main__":
    typer.run(main)
