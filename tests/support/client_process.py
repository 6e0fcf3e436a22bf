"""A client process that can be killed: python -m tests.support.client_process ADDRESS FIRST COUNT TOKENS

Runs COUNT streams at once, with seeds FIRST, FIRST + 1, ..., says "started" when each has its first token, then prints
a JSON line {seed: token ids}.
"""

import asyncio
import json
import sys

from grpc import aio
from quire.v1 import generation_service_pb2_grpc as pb_grpc

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


async def main(address: str, first: int, count: int, tokens: int) -> None:
    started = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(run(address, seed, tokens, started)) for seed in range(first, first + count)]
    for _ in range(count):
        await started.acquire()
    print("started", flush=True)
    print(json.dumps(dict(zip(range(first, first + count), await asyncio.gather(*tasks), strict=True))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
