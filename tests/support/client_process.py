"""A client process that can be killed, forked by a test's fork server: its arguments are ADDRESS FIRST COUNT TOKENS.

Runs COUNT streams at once, with seeds FIRST, FIRST + 1, ..., says "started" when each has its first token, then prints
a JSON line {seed: token ids}.
"""

import asyncio
import json
import subprocess
import sys

from grpc import aio
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.forking import Forked
from tests.support.quire_command import run_and_end
from tests.support.server import stream_request

PROMPTS = ("First Citizen:", "ROMEO:\nO,", "KING RICHARD III:\nNow is the winter", "A", "Enter the duke.\n\n")


def prompt_of(seed: int) -> str:
    return PROMPTS[seed % len(PROMPTS)] * (1 + seed % 7)


async def run(address: str, seed: int, tokens: int, started: asyncio.Semaphore) -> list[int]:
    async with aio.insecure_channel(address) as channel:
        ids: list[int] = []
        stub = pb_grpc.GenerationServiceStub(channel)
        async for message in stub.StreamGenerate(stream_request(prompt_of(seed), tokens, seed=seed, temperature=1.0)):
            for delta in message.deltas:
                assert delta.first_position == len(ids)
                ids.extend(delta.token_ids)
            started.release()
        return ids


def client(address: str, first: int, count: int, tokens: int) -> subprocess.Popen[str]:
    """Starts this module's `main`, whose output can be read."""
    command = [__name__, address, str(first), str(count), str(tokens)]
    return Forked(__name__, command, command, stdout=subprocess.PIPE, text=True)


async def run_streams(address: str, first: int, count: int, tokens: int) -> None:
    started = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(run(address, seed, tokens, started)) for seed in range(first, first + count)]
    for _ in range(count):
        await started.acquire()
    print("started", flush=True)
    print(json.dumps(dict(zip(range(first, first + count), await asyncio.gather(*tasks), strict=True))), flush=True)


def main() -> None:
    run_and_end(lambda: asyncio.run(run_streams(sys.argv[1], *map(int, sys.argv[2:]))))
