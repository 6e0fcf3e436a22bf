"""Sends many requests at once from one asyncio loop, prints each answer as it comes, and drops what takes too long.

    make serve                                    # in another terminal
    python examples/async_requests.py [HOST:PORT]

The server computes the requests together: each step adds a token to each of them.
"""

import asyncio
import sys

from quire import AsyncClient, OverloadedError

SERVER = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
ROLES = ("ROMEO", "JULIET", "MERCUTIO", "NURSE", "FRIAR LAURENCE", "TYBALT", "BENVOLIO", "PARIS")
SECONDS = 30


async def ask(client: AsyncClient, role: str) -> None:
    try:
        async with asyncio.timeout(SECONDS):  # a task that is cancelled ends its request on the server too
            answer = await client.generate(f"{role}:", max_tokens=40, temperature=0.8)
    except TimeoutError:
        print(f"--- {role}: no answer within {SECONDS} s")
    except OverloadedError as error:  # after the waits that the client's `refusals` allows
        print(f"--- {role}: the server is full ({error.reason}), come back in {error.retry_after} s")
    else:
        print(f"--- {role}:{answer.sequences[0].text}")


async def main() -> None:
    async with AsyncClient(SERVER) as client, asyncio.TaskGroup() as group:
        for role in ROLES:
            group.create_task(ask(client, role))


asyncio.run(main())
