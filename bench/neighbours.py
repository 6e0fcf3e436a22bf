"""Measures what one client's heavy, valid requests cost another client of the same server.

Beside each load a probe streams plain text, sends short requests one after the other, and asks for the health. The
loads occupy the same number of batch rows: plain streams, beam searches with logprobs, requests of many sequences with
logprobs. All run in turns on one server with the demo model. Times are wall-clock times, so nothing else may run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import typer
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.figures import AsJson, show
from bench.serving import started

PROMPT = "To be, or not to be, that is the question: "
TOKENS = 400


@dataclass
class NeighbourTimes:
    """Seconds measured by the probe.

    Attributes:
        gaps: Seconds between two messages of its stream.
        short: Seconds of a short request.
        health: Seconds of a health check.
    """

    gaps: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def spec(tokens: int, sampling: pb.SamplingParameters | None = None) -> pb.GenerationSpec:
    made = pb.GenerationSpec(text=PROMPT, sampling=sampling)
    made.stopping.max_tokens, made.stopping.ignore_eos = tokens, True
    return made


def plain(i: int) -> list[pb.GenerationSpec]:
    return [spec(TOKENS, pb.SamplingParameters(seed=16 * i + j, temperature=1.0)) for j in range(16)]


def searches(_: int) -> list[pb.GenerationSpec]:
    made = spec(TOKENS, pb.SamplingParameters(beam_search=pb.BeamSearch(width=16), sequence_count=8))
    made.output.logprobs, made.output.top_logprobs = True, 20
    return [made]


def many_sequences(i: int) -> list[pb.GenerationSpec]:
    made = [spec(TOKENS, pb.SamplingParameters(seed=2 * i + j, temperature=1.0, sequence_count=8)) for j in range(2)]
    for one in made:
        one.output.logprobs, one.output.top_logprobs = True, 20
    return made


LOADS: dict[str, Callable[[int], list[pb.GenerationSpec]]] = {
    "plain": plain,
    "searches": searches,
    "sequences": many_sequences,
}


async def repeat(stop: asyncio.Event, once: Callable[[], Awaitable[object]], into: list[float] | None = None) -> None:
    while not stop.is_set():
        began = time.perf_counter()
        await once()
        if into is not None:
            into.append(time.perf_counter() - began)


async def stream_gaps(stub: pb_grpc.GenerationServiceStub, stop: asyncio.Event, into: list[float]) -> None:
    while not stop.is_set():
        last = None
        async for _ in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec(TOKENS))):
            now = time.perf_counter()
            if last is not None:
                into.append(now - last)
            last = now
            if stop.is_set():
                break


async def measure(
    address: str, load: Callable[[int], list[pb.GenerationSpec]] | None, groups: int, seconds: float
) -> NeighbourTimes:
    seen, stop = NeighbourTimes(), asyncio.Event()
    unlimited = [("grpc.max_receive_message_length", -1)]
    async with aio.insecure_channel(address, unlimited) as heavy, aio.insecure_channel(address) as own:
        loads, probe = pb_grpc.GenerationServiceStub(heavy), pb_grpc.GenerationServiceStub(own)
        health = health_pb2_grpc.HealthStub(own)
        tasks = [
            asyncio.create_task(repeat(stop, lambda one=one: loads.Generate(pb.GenerateRequest(spec=one))))  # type: ignore[misc]
            for i in range(groups)
            for one in (load(i) if load is not None else ())
        ]
        await asyncio.sleep(seconds / 4)
        probes = [
            asyncio.create_task(stream_gaps(probe, stop, seen.gaps)),
            asyncio.create_task(repeat(stop, lambda: probe.Generate(pb.GenerateRequest(spec=spec(8))), seen.short)),
            asyncio.create_task(repeat(stop, lambda: health.Check(health_pb2.HealthCheckRequest()), seen.health)),
        ]
        await asyncio.sleep(seconds)
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*probes)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    return seen


def figures(seen: NeighbourTimes) -> dict[str, float]:
    found = dict[str, float]()
    for name, values in (("token gap", seen.gaps), ("short request", seen.short), ("health", seen.health)):
        ordered = sorted(values)
        found |= {
            f"{name}, median ms": median(ordered) * 1e3,
            f"{name}, 99 % ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            f"{name}, most ms": ordered[-1] * 1e3,
        }
    return found


def main(
    groups: Annotated[int, typer.Option(help="Of 16 batch rows each.", min=1)] = 6,
    seconds: Annotated[float, typer.Option(help="That each load is measured.")] = 20.0,
    server: Annotated[str, typer.Option(help="HOST:PORT of a server that runs; else one is started.")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure the probe alone, then beside each load."""

    def run(address: str) -> None:
        found = {"alone": figures(asyncio.run(measure(address, None, 0, seconds / 4)))}
        for name, load in LOADS.items():
            found[name] = figures(asyncio.run(measure(address, load, groups, seconds)))
        show(f"a probe beside {groups} x 16 rows of {TOKENS} tokens", found, as_json)

    if server:
        run(server)
    else:
        with started() as serving:
            run(serving.address)


if __name__ == "__main__":
    typer.run(main)
