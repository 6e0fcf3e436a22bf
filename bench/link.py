"""Measures the cost of the engine link: 64 streams, paced steps, the engine in process and behind the link.

Three modes are interleaved: `bare` (an engine whose outputs are dropped), `thread` (in process) and `process` (behind
the link). The link's cost at the engine is the CPU time a token of the engine's process beyond that of `bare`. The
added latency is the difference of the medians of `process` and `thread`, from a step's end to the client's receipt.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.figures import AsJson, show
from bench.paced import CYCLE, PERIOD, STREAMS

WARM_UP = 2.0  # seconds
MODES = ("bare", "thread", "process")


@dataclass(frozen=True, slots=True)
class LinkWindow:
    """One window of one mode.

    Attributes:
        tokens: Number of tokens.
        latencies: Seconds from a step's end to the client, for each message.
        engine_cpu: CPU seconds of the engine's process.
        frontend_cpu: CPU seconds of the frontend's process.
        others: Share of the machine that other processes used.
    """

    tokens: int
    latencies: list[float]
    engine_cpu: float
    frontend_cpu: float
    others: float

    @property
    def engine_us(self) -> float:
        """Microseconds of CPU time of the engine's process a token."""
        return 1e6 * self.engine_cpu / self.tokens


@contextmanager
def running(*mode: str) -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.paced", *mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None  # noqa: S101 - pipes were asked for
    assert process.stdout is not None  # noqa: S101
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


class Meter:
    """Measures the CPU time of the engine, the frontend and the machine since its creation."""

    def __init__(self, ids: dict[str, Any]) -> None:
        self._processes = {pid: psutil.Process(pid) for pid in {ids["engine"], ids.get("frontend", ids["engine"])}}
        self._ids, self._own = ids, psutil.Process()
        self._before = self._read()
        self._began = time.monotonic()

    def _read(self) -> dict[Any, float]:
        times = {pid: sum(process.cpu_times()[:2]) for pid, process in self._processes.items()}
        machine = psutil.cpu_times()
        return times | {"own": sum(self._own.cpu_times()[:2]), "busy": sum(machine) - machine.idle - machine.iowait}

    def window(self, tokens: int, latencies: list[float]) -> LinkWindow:
        used = {key: after - self._before[key] for key, after in self._read().items()}
        ours = sum(seconds for key, seconds in used.items() if key != "busy")
        capacity = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        frontend = used[self._ids["frontend"]] if "frontend" in self._ids else 0.0
        return LinkWindow(
            tokens, latencies, used[self._ids["engine"]], frontend, max(0.0, used["busy"] - ours) / capacity
        )


def measure_bare(seconds: float) -> LinkWindow:
    with running("bare") as ids:
        time.sleep(WARM_UP)
        meter = Meter(ids)
        time.sleep(seconds)
        return meter.window(round(seconds / PERIOD) * STREAMS, [])


def measure_served(mode: str, seconds: float) -> LinkWindow:
    with running(mode) as ids:
        return asyncio.run(_measure(ids, seconds))


async def _measure(ids: dict[str, Any], seconds: float) -> LinkWindow:
    latencies: list[float] = []
    tokens = 0
    measuring = False

    async def read(stub: pb_grpc.GenerationServiceStub) -> None:
        nonlocal tokens
        spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1, 2, 3, 4]), stopping=pb.StoppingCriteria(ignore_eos=True))
        spec.output.token_ids = True
        async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
            if measuring:
                ids = message.deltas[0].token_ids
                tokens += len(ids)
                latencies.append(age(ids[-1], time.monotonic()))

    async with aio.insecure_channel(ids["address"]) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        readers = [asyncio.create_task(read(stub)) for _ in range(STREAMS)]
        await asyncio.sleep(WARM_UP)
        meter, measuring = Meter(ids), True
        await asyncio.sleep(seconds)
        window = meter.window(tokens, latencies)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return window


def age(token: int, now: float) -> float:
    """Returns seconds since the end of the step that made the token."""
    behind = (int(now / PERIOD) - token) % CYCLE
    return now - (int(now / PERIOD) - behind) * PERIOD


def report(windows: dict[str, list[LinkWindow]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for mode, runs in windows.items():
        row: dict[str, Any] = {
            "tokens": sum(w.tokens for w in runs),
            "engine_us_per_token": median(w.engine_us for w in runs),
        }
        if mode != "bare":
            for p in (50, 90, 99):
                row[f"latency_p{p}_ms"] = median(1000 * float(np.percentile(w.latencies, p)) for w in runs)
            row["frontend_us_per_token"] = median(1e6 * w.frontend_cpu / w.tokens for w in runs)
        row["others_share_of_machine"] = median(w.others for w in runs)
        rows[mode] = row
    rows["link"] = {
        "engine_us_per_token": rows["process"]["engine_us_per_token"] - rows["bare"]["engine_us_per_token"],
        "added_latency_p50_ms": rows["process"]["latency_p50_ms"] - rows["thread"]["latency_p50_ms"],
    }
    return rows


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each mode; medians are reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a window.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure the engine link: 64 streams, a token each every 20 ms."""
    windows: dict[str, list[LinkWindow]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            windows[mode].append(measure_bare(seconds) if mode == "bare" else measure_served(mode, seconds))
    title = f"Engine link: {STREAMS} streams, steps of {1000 * PERIOD:g} ms, medians of {rounds}"
    show(title, report(windows), as_json)


if __name__ == "__main__":
    typer.run(main)
