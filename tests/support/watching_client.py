"""A client process that keeps a history of its streams.

    python -m tests.support.watching_client ADDRESS STREAMS TOKENS

Prints "running" once every stream has its first token, and at the end one line of JSON: for each stream its token ids,
its status and the longest time between two of its messages. A gap, a duplicate or a token after the end is an error of
its own. Streams differ in how they draw: greedy, seeded, with penalties, with several sequences, with stop strings.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.forking import Forked
from tests.support.quire_command import run_and_end


@dataclass
class History:
    """Messages of one stream. tokens: those of each sequence. gap: the longest wait for a message, in seconds."""

    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    status: str = ""
    gap: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def take(self, answer: pb.StreamGenerateResponse) -> None:
        for delta in answer.deltas:
            while len(self.tokens) <= delta.index:
                self.tokens.append([])
                self.texts.append("")
                self.finishes.append("")
            known = self.tokens[delta.index]
            if self.finishes[delta.index]:
                self.wrong.append(f"sequence {delta.index}: something after its end")
            if delta.token_ids and delta.first_position != len(known):
                self.wrong.append(f"sequence {delta.index}: {delta.first_position} came where {len(known)} was due")
            known.extend(delta.token_ids)
            self.texts[delta.index] += delta.text
            if delta.finish_reason:
                self.finishes[delta.index] = pb.FinishReason.Name(delta.finish_reason)


def request_of(number: int, tokens: int) -> pb.StreamGenerateRequest:
    """The same for the same number, whatever else runs."""
    spec = pb.GenerationSpec(
        text=f"Scene {number}.\n\nKING:",
        sampling=pb.SamplingParameters(seed=number, temperature=0.0 if number % 4 == 0 else 0.9),
        stopping=pb.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
    if number % 4 == 1:
        spec.sampling.frequency_penalty, spec.sampling.repetition_penalty = 0.5, 1.2
    if number % 4 == 2:
        spec.sampling.sequence_count = 2
    if number % 4 == 3:
        spec.stopping.stop.extend(["QUEEN", "\n\n\n"])
    return pb.StreamGenerateRequest(spec=spec)


async def watch(stub: pb_grpc.GenerationServiceStub, number: int, tokens: int, first: asyncio.Event) -> History:
    history, last = History(), time.monotonic()
    call = stub.StreamGenerate(request_of(number, tokens), timeout=280)
    try:
        async for answer in call:
            now = time.monotonic()
            if first.is_set():
                history.gap = max(history.gap, now - last)
            last = now
            history.take(answer)
            first.set()
    except grpc.RpcError as error:
        history.wrong.append(f"{error.code().name}: {error.details()}")
    finally:
        first.set()
    history.status = (await call.code()).name
    return history


def watching(address: str, streams: int, tokens: int) -> subprocess.Popen:
    """This module as a process that a test's fork server forks."""
    command = ["tests.support.watching_client", address, str(streams), str(tokens)]
    return Forked(command[0], command, command, stdout=subprocess.PIPE, text=True)


def until_running(process: subprocess.Popen) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"


def histories_of(process: subprocess.Popen, streams: int) -> list[dict]:
    """In which nothing may be wrong."""
    assert process.stdout is not None
    histories = json.loads(process.stdout.readline())
    assert process.wait() == 0
    assert [(history["wrong"], history["status"]) for history in histories] == [([], "OK")] * streams
    return histories


def outputs_of(histories: list[dict]) -> list[dict]:
    return [{name: history[name] for name in ("tokens", "texts", "finishes")} for history in histories]


async def watch_all(address: str, streams: int, tokens: int) -> None:
    async with aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        firsts = [asyncio.Event() for _ in range(streams)]
        watching = [asyncio.create_task(watch(stub, i, tokens, firsts[i])) for i in range(streams)]
        for first in firsts:
            await first.wait()
        print("running", flush=True)
        print(json.dumps([asdict(await one) for one in watching]), flush=True)


def main() -> None:
    run_and_end(lambda: asyncio.run(watch_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()
