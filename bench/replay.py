"""Replays real traffic through a server over gRPC: arrivals and lengths of a conversation service of Azure, prompts cut
from Shakespeare's plays. `make demo` runs it.
"""

import asyncio
import json
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

import grpc
import numpy as np
import typer
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.serving import Serving, serves, started
from bench.trace import CONVERSATIONS, Arrival, read_trace, scaled
from model.config import read_config
from model.inputs.tokenizer import Tokenizer
from rpc.paths import demo_directory

DEFAULT = Serving("127.0.0.1:50051", "http://127.0.0.1:9464/metrics")
PLAYS = demo_directory().parent / "tinyshakespeare.txt"
PATIENT = ("--max-queue-time", "300")  # a slow machine falls behind; what fits is not to be refused for that
SAMPLE_SECONDS = 0.1  # between two looks at the metrics
CALL_SECONDS = 600.0  # after which a request is lost


@dataclass(slots=True)
class Seen:
    """What the client saw of one request. sent: when. tokens: when each came. outcome: "ok", "refused" or "lost"."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    outcome: str = "lost"
    error: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """Of latency, in seconds, for a request's first token and for each of its others on average. share: of requests
    that must meet both (goodput, Zhong et al., DistServe, OSDI 2024).
    """

    first: float
    other: float
    share: float

    def met_by(self, seen: Seen) -> bool:
        if seen.outcome != "ok" or not seen.tokens:
            return False
        others = (seen.tokens[-1] - seen.tokens[0]) / max(1, len(seen.tokens) - 1)
        return seen.tokens[0] - seen.sent <= self.first and others <= self.other


@dataclass(slots=True)
class Load:
    """The server's gauges during the replay."""

    pages_peak: float = 0.0
    usage: list[float] = field(default_factory=list)
    running_peak: float = 0.0
    waiting_peak: float = 0.0


def prompts(arrivals: list[Arrival]) -> list[list[int]]:
    """For each arrival that many tokens, from somewhere in the plays; the same ones each time."""
    tokens = Tokenizer.load(demo_directory()).encode(PLAYS.read_text(encoding="utf-8"), add_special_tokens=False)
    rng = random.Random(0)
    starts = [rng.randrange(len(tokens) - arrival.prompt) for arrival in arrivals]
    return [tokens[start : start + arrival.prompt] for start, arrival in zip(starts, arrivals, strict=True)]


async def send(stub: pb_grpc.GenerationServiceStub, arrival: Arrival, prompt: list[int], seed: int) -> Seen:
    """One request, to its end."""
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParameters(seed=seed),
        stopping=pb.StoppingCriteria(max_tokens=arrival.output, ignore_eos=True),
    )
    seen = Seen(time.monotonic())
    try:
        async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS):
            now = time.monotonic()
            for delta in message.deltas:
                if delta.first_position != len(seen.tokens):
                    seen.error = f"token {delta.first_position} came where {len(seen.tokens)} was due"
                seen.tokens.extend([now] * delta.token_count)
    except aio.AioRpcError as error:
        seen.error = f"{error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            seen.outcome = "refused"
    if not seen.error and len(seen.tokens) == arrival.output:
        seen.outcome = "ok"
    return seen


async def replay(serving: Serving, arrivals: list[Arrival], bar: Progress) -> tuple[list[Seen], Load, float]:
    """All requests at their times. Returns what came of each, the server's load, and the seconds it took."""
    texts, load = prompts(arrivals), Load()
    task = bar.add_task("", total=len(arrivals), tokens=0)
    watch = asyncio.create_task(observe(serving, load))
    tokens = 0

    async def at_its_time(i: int) -> Seen:
        nonlocal tokens
        await asyncio.sleep(begin + arrivals[i].at - time.monotonic())
        seen = await send(stubs[i % len(stubs)], arrivals[i], texts[i], seed=i)
        tokens += len(seen.tokens)
        bar.update(task, advance=1, tokens=tokens)
        return seen

    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each: one carries 128 streams
    channels = [aio.insecure_channel(serving.address, options=options) for _ in range(1 + len(arrivals) // 100)]
    stubs = [pb_grpc.GenerationServiceStub(channel) for channel in channels]
    begin = time.monotonic() + 0.1
    seen = await asyncio.gather(*(at_its_time(i) for i in range(len(arrivals))))
    seconds = time.monotonic() - begin
    watch.cancel()
    await asyncio.gather(watch, *(channel.close(None) for channel in channels), return_exceptions=True)
    return seen, load, seconds


async def observe(serving: Serving, load: Load) -> None:
    while True:
        metrics = await asyncio.to_thread(serving.metrics)
        load.pages_peak = max(load.pages_peak, metrics["quire_kv_pages_used"])
        load.usage.append(metrics["quire_kv_cache_usage_ratio"])
        load.running_peak = max(load.running_peak, metrics["quire_num_requests_running"])
        load.waiting_peak = max(load.waiting_peak, metrics["quire_num_requests_waiting"])
        await asyncio.sleep(SAMPLE_SECONDS)


def wait_pages_free(serving: Serving, seconds: float = 10.0) -> float:
    """Pages that are still held when nothing runs any more, at most so long after."""
    deadline = time.monotonic() + seconds
    while (used := serving.metrics()["quire_kv_pages_used"]) and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return used


def percentiles(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    if not values:
        return {}
    return {f"p{p}": round(1000 * float(np.percentile(values, p)), 1) for p in (50, 90, 99)}


def summary(seen: list[Seen], load: Load, seconds: float, arrivals: list[Arrival], targets: Targets) -> dict[str, Any]:
    outcomes = [s.outcome for s in seen]
    generated = sum(len(s.tokens) for s in seen)
    return {
        "requests": len(seen),
        "ok": outcomes.count("ok"),
        "refused": outcomes.count("refused"),
        "lost": outcomes.count("lost"),
        "errors": sorted({s.error for s in seen if s.error}),
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(seen) / seconds, 2),
        "prompt_tokens_per_second": round(sum(a.prompt for a in arrivals) / seconds, 1),
        "generated_tokens_per_second": round(generated / seconds, 1),
        "time_to_first_token_ms": percentiles([s.tokens[0] - s.sent for s in seen if s.tokens]),
        "inter_token_latency_ms": percentiles([gap for s in seen for gap in np.diff(s.tokens).tolist()]),
        "met_latency_targets": round(sum(targets.met_by(s) for s in seen) / len(seen), 4),
        "kv_pages_peak": int(load.pages_peak),
        "kv_usage_peak": round(max(load.usage, default=0.0), 4),
        "kv_usage_mean": round(float(np.mean(load.usage)) if load.usage else 0.0, 4),
        "running_peak": int(load.running_peak),
        "waiting_peak": int(load.waiting_peak),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Replay of Azure's conversation trace", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, value in result.items():
        if isinstance(value, dict):
            value = "  ".join(f"{name} {number}" for name, number in value.items())
        elif isinstance(value, list):
            value = "\n".join(value) or "none"
        table.add_row(key.replace("_", " "), str(value))
    console.print(table)


def main(
    server: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running server of the demo model. Unset: the one of `make serve` if it runs, else one "
            "that is started for this.",
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[str, typer.Option(help="Its metrics page.")] = DEFAULT.metrics_url,
    ray: Annotated[bool, typer.Option("--ray", help="Start a server with its engine in a Ray actor.")] = False,
    requests: Annotated[int, typer.Option(min=1, max=200, help="How many requests of the trace.")] = 200,
    speed: Annotated[float, typer.Option(min=0.01, help="Times as fast as they came.")] = 2.0,
    ttft: Annotated[float, typer.Option(help="Target for a request's first token, in seconds.")] = 10.0,
    tpot: Annotated[float, typer.Option(help="Target for each other token of a request on average.")] = 0.5,
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the requests: so many must meet both, else this fails.")
    ] = 0.0,
    json_output: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Replay real traffic through a server; fails if a request was lost or refused, a KV page stays held, or fewer
    requests met the targets of latency than must.
    """
    console = Console(stderr=True)
    place: AbstractContextManager[Serving]
    if server is not None:
        place = nullcontext(Serving(server, metrics))
    elif not ray and serves(DEFAULT.metrics_url, "quire-demo"):
        place = nullcontext(DEFAULT)
    else:
        console.print("starting a server" + (" with its engine in a Ray actor" if ray else ""))
        place = started(*PATIENT, *(["--ray"] if ray else []))
    arrivals = scaled(read_trace(CONVERSATIONS, requests), read_config(demo_directory()).context, speed)
    with place as serving:
        console.print(f"replaying {requests} requests over {arrivals[-1].at:.1f} s to {serving.address}")
        before = serving.metrics()
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            seen, load, seconds = asyncio.run(replay(serving, arrivals, bar))
        targets = Targets(ttft, tpot, share)
        result = summary(seen, load, seconds, arrivals, targets)
        result["kv_pages_held_at_the_end"] = int(wait_pages_free(serving))
        result["preemptions"] = int(
            serving.metrics()["quire_num_preemptions_total"] - before["quire_num_preemptions_total"]
        )
    if json_output:
        print(json.dumps(result))
    else:
        show(result, Console())
    late = result["met_latency_targets"] < targets.share
    if result["ok"] != requests or result["kv_pages_held_at_the_end"] or late:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
