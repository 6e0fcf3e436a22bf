"""Measures the whole server over gRPC beside its engine alone, with the same requests, interleaved.

`alone` is an engine whose outputs are dropped, `served` a `quire serve` whose clients are in this process. Both run a
llama of random weights on the same cores. The clients' CPU use is printed beside the ratio. Times are wall-clock times,
so nothing else may run.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.serving import Serving, started
from bench.shapes import MODELS, write_model
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.frontend.prepare import load_preparer
from rpc.paths import demo_directory
from rpc.settings import EngineConfig
from scheduler.events import StepOutputs, Submit
from scheduler.parameters import Sampling, Stopping
from scheduler.spec import Spec

PROMPT = tuple(range(1, 17))
KV_BYTES = 2**30


def alone(directory: str) -> None:
    """Answers each line `STREAMS TOKENS` with the seconds that these requests took."""
    config = EngineConfig(model=ModelSettings(directory, kv_cache_memory=KV_BYTES))
    preparer, done, waiting = load_preparer(config.model), threading.Event(), set[int]()

    def sink(outputs: StepOutputs) -> None:
        waiting.difference_update(outputs.over)
        if not waiting:
            done.set()

    engine = assemble(config).engine(sink)
    engine.start()
    print("ready", flush=True)
    attempts = 0
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        spec = Spec(PROMPT, sampling=Sampling(temperature=0.0), stopping=Stopping(max_tokens=tokens, ignore_eos=True))
        submits = [Submit(attempts + i, preparer.prepare(spec, engine.info.limits)) for i in range(1, streams + 1)]
        attempts += streams
        waiting.update(submit.attempt for submit in submits)
        done.clear()
        began = time.monotonic()
        engine.send(submits)
        done.wait()
        print(time.monotonic() - began, flush=True)
    engine.stop()


class Alone:
    """An engine without a server, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None  # noqa: S101 - pipes were asked for
        assert process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = process.stdin, process.stdout
        if self._stdout.readline() != "ready\n":
            raise RuntimeError("the engine did not start")

    def run(self, streams: int, tokens: int) -> float:
        self._stdin.write(f"{streams} {tokens}\n")
        self._stdin.flush()
        return float(self._stdout.readline())


@contextmanager
def engine_alone(directory: Path) -> Iterator[Alone]:
    command = [sys.executable, "-m", "bench.whole_server", "--alone", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Alone(process)
    finally:
        process.kill()
        process.wait()


async def run_served(serving: Serving, streams: int, tokens: int, group: int) -> float:
    """Returns seconds for all streams, with at least `group` tokens a message.

    Raises:
        RuntimeError: Tokens are missing.
    """
    spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=PROMPT))
    spec.sampling.temperature = 0.0
    spec.stopping.max_tokens, spec.stopping.ignore_eos = tokens, True

    async def read(stub: pb_grpc.GenerationServiceStub) -> int:
        options = pb.StreamOptions(min_tokens_per_message=group)
        call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec, stream_options=options))
        return sum([delta.token_count async for message in call for delta in message.deltas])

    async with aio.insecure_channel(serving.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        began = time.monotonic()
        counts = await asyncio.gather(*(read(stub) for _ in range(streams)))
        took = time.monotonic() - began
    if set(counts) != {tokens}:
        raise RuntimeError(f"streams of {sorted(set(counts))} tokens, not {tokens}")
    return took


async def compare(directory: Path, streams: int, tokens: int, group: int, rounds: int) -> None:
    flags = "--model", str(directory), "--kv-cache-memory", str(KV_BYTES)
    with engine_alone(directory) as engine, started(*flags) as serving:
        without, served, clients = list[float](), list[float](), list[float]()
        for i in range(rounds + 1):
            first = engine.run(streams, tokens)
            cpu = time.process_time()
            second = await run_served(serving, streams, tokens, group)
            if i:  # the first round warms up
                without.append(first)
                served.append(second)
                clients.append((time.process_time() - cpu) / second)
    ratio = median(b / a for a, b in zip(without, served, strict=True))
    rates = [streams * tokens / median(times) for times in (without, served)]
    print(
        f"{streams} streams of {tokens} tokens, {group} or more a message, medians of {rounds}: engine alone "
        f"{rates[0]:,.0f} tokens/s, served {rates[1]:,.0f}; a round took {ratio:.3f} times as long; the clients used "
        f"{median(clients):.2f} of a core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-135m", help="the shape (default %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each output (default %(default)s)")
    parser.add_argument("--group", type=int, default=1, help="tokens that a message waits for (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default %(default)s)")
    parser.add_argument("--alone", metavar="DIR", help="be the engine without a server, asked over standard input")
    args = parser.parse_args()
    if args.alone:
        alone(args.alone)
        return
    with tempfile.TemporaryDirectory() as place:
        directory = write_model(Path(place), MODELS[args.model])
        shutil.copy(demo_directory() / "tokenizer.json", directory)
        asyncio.run(compare(directory, args.streams, args.tokens, args.group, args.rounds))


if __name__ == "__main__":
    main()
