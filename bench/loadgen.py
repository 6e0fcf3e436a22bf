"""Measures the cost of a token in the load generator (`quire bench serve`), on streams of a stub engine.

Three modes are interleaved: `bare` is a grpc.aio client that drops its messages (with a rate only). `quire` is the
generator on the same streams, `openai` the generator on those of a `quire gateway`. CPU time is that of the client's
whole process, and is valid on a busy machine too. `busy` is the share of time in which its event loop ran.
"""

import asyncio
from statistics import median
from typing import Annotated

import typer

from bench.figures import AsJson, show
from bench.frontend import running
from bench.gateway import bare, gateway
from rpc.client.security import OPEN
from rpc.loadgen.drive import Drive
from rpc.loadgen.native import Native
from rpc.loadgen.openai_http import OpenAI
from rpc.loadgen.wire import LoadRequest, Wire

ENDLESS = 10**6
PROMPT = [1, 2, 3, 4]


async def of_generator(wire: Wire, streams: int, seconds: float) -> dict[str, float]:
    """Returns the generator's figures for streams that run all the time. Raises RuntimeError if one fails."""
    drive = Drive(wire.send, 600, scheduled=False)
    asyncio.get_running_loop().call_later(seconds, drive.stop)
    run = await drive.run_closed((LoadRequest(i, PROMPT, 4, ENDLESS) for i in range(streams)), streams)
    await wire.close()
    tokens = sum(seen.tokens for seen in run.seen)
    if not tokens or any(seen.message for seen in run.seen):
        raise RuntimeError(f"{tokens} tokens came, and {next((seen.message for seen in run.seen if seen.message), '')}")
    return {
        "us_per_token": 1e6 * run.effort.cpu / tokens,
        "tokens_per_second": tokens / run.effort.seconds,
        "busy": run.effort.loop / run.effort.seconds,
    }


async def measure(streams: int, rate: float, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}

    def note(mode: str, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            found.setdefault(mode, {}).setdefault(name, []).append(value)

    for _ in range(rounds):
        if rate:
            with running("served", rate) as server:
                note("bare", {"us_per_token": await bare(server.address, streams, seconds)})
        with running("served", rate) as server:
            note("quire", await of_generator(Native(server.address, "", OPEN, True), streams, seconds))
        with running("served", rate) as server, gateway(server.address) as (_, http):
            note(
                "openai",
                await of_generator(OpenAI(f"http://{http}/v1", "quire-demo", OPEN, True, None), streams, seconds),
            )
    return {mode: {name: median(values) for name, values in of.items()} for mode, of in found.items()}


def main(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 64,
    rate: Annotated[float, typer.Option(min=0, help="Tokens a second of each; 0: as fast as they are taken.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each mode; medians are reported.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a window.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure the load generator's own cost."""
    figures = asyncio.run(measure(streams, rate, rounds, seconds))
    show(f"Load generator: {streams} streams, medians of {rounds}", figures, as_json)


if __name__ == "__main__":
    typer.run(main)
