"""What one client's heavy, valid requests cost another client of the same server.

Beside each load a probe streams plain text, sends short requests one after the other, and asks for the health. The loads
occupy the same number of batch rows: plain streams, beam searches with logprobs, requests of many sequences with
logprobs. All run in turns on one server with the demo model; times are of the clock, so nothing else may run.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.figures import show
from bench.serving import started

PROMPT = "To be, or not to be, that is the question: "
LONG = 900


@dataclass
class Seen:
    """Seconds that the probe measured."""

    gaps: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


def spec(tokens: int, **sampling: object) -> pb.GenerationSpec:
    made = pb.GenerationSpec(text=PROMPT, sampling=pb.SamplingParameters(**sampling))
    made.stopping.max_tokens, made.stopping.ignore_eos = tokens, True
    return made


def plain(i: int) -> list[pb.GenerationSpec]:
    return [spec(LONG, seed=16 * i + j, temperature=1.0) for j in range(16)]


def searches(i: int) -> list[pb.GenerationSpec]:
    made = spec(LONG, beam_search=pb.BeamSearch(width=16), sequence_count=8)
    made.output.logprobs, made.output.top_logprobs = True, 20
    return [made]


def many_sequences(i: int) -> list[pb.GenerationSpec]:
    made = [spec(LONG, seed=2 * i + j, temperature=1.0, sequence_count=8) for j in range(2)]
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
        async for _ in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec(LONG))):
            now = time.perf_counter()
            if last is not None:
                into.append(now - last)
            last = now
            if stop.is_set():
                break


async def measure(
    address: str, load: Callable[[int], list[pb.GenerationSpec]] | None, groups: int, seconds: float
) -> Seen:
    seen, stop = Seen(), asyncio.Event()
    unlimited = [("grpc.max_receive_message_length", -1)]
    async with aio.insecure_channel(address, unlimited) as heavy, aio.insecure_channel(address) as own:
        loads, probe, health = (
            pb_grpc.GenerationServiceStub(heavy),
            pb_grpc.GenerationServiceStub(own),
            health_pb2_grpc.HealthStub(own),
        )
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


def figures(seen: Seen) -> dict[str, float]:
    found = {}
    for name, values in (("token gap", seen.gaps), ("short request", seen.short), ("health", seen.health)):
        ordered = sorted(values)
        found |= {
            f"{name}, median ms": median(ordered) * 1e3,
            f"{name}, 99 % ms": ordered[int(len(ordered) * 0.99)] * 1e3,
            f"{name}, most ms": ordered[-1] * 1e3,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=6, help="of 16 rows each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (default %(default)s)")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=[*LOADS], help="in this order")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--server", help="HOST:PORT of a server that runs; else one is started")
    args = parser.parse_args()

    def run(address: str) -> dict[str, dict[str, float]]:
        found = {"alone": figures(asyncio.run(measure(address, None, 0, args.seconds / 4)))}
        for name in args.loads:
            found[name] = figures(asyncio.run(measure(address, LOADS[name], args.groups, args.seconds)))
        return found

    if args.server:
        made = run(args.server)
    else:
        with started() as serving:
            made = run(serving.address)
    show(f"beside {args.groups} x 16 rows", made, args.json)


if __name__ == "__main__":
    main()
