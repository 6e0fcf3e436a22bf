"""Spreads requests over engines that are actors of a Ray cluster, and shows where they run.

    quire serve --ray --replicas 2                          # in another terminal; starts a cluster on this machine
    quire serve --ray-address HEAD:6379 --replicas 2        # or this, for a cluster that is there
    python examples/ray_cluster.py [--server HOST:PORT] [--admin HOST:PORT]

Clients see one server, which sends each request to the engine with the least to do. The admin port, which is the
operator's, says where the engines run. It is asked with the generated stubs of `quire.v1`, as any rpc can be.
"""

import argparse
import asyncio

from grpc import aio
from quire import AsyncClient
from quire.v1 import admin_service_pb2, admin_service_pb2_grpc

parser = argparse.ArgumentParser()
parser.add_argument("--server", default="127.0.0.1:50051")
parser.add_argument("--admin", default="127.0.0.1:50052")
asked = parser.parse_args()


async def follow(client: AsyncClient, role: str, begun: asyncio.Future[str]) -> None:
    """Reads a stream for as long as it lasts: the server cuts off a client that does not read."""
    async for text in client.stream(f"{role}:", ignore_eos=True).text():
        if not begun.done():
            begun.set_result(text)


async def main() -> None:
    client, channel = AsyncClient(asked.server, timeout=60), aio.insecure_channel(asked.admin)
    async with client, channel, asyncio.TaskGroup() as group:  # a reader that fails ends the program
        readers = []
        for role in ("ROMEO", "JULIET", "MERCUTIO", "NURSE"):
            begun = asyncio.get_running_loop().create_future()
            # No max_tokens and no end of text: a request that ended before the others began would have its engine free.
            readers.append(group.create_task(follow(client, role, begun)))
            print(f"{role} has begun: {await begun!r}")
        operator = admin_service_pb2_grpc.AdminServiceStub(channel)
        for replica in (await operator.ListReplicas(admin_service_pb2.ListReplicasRequest())).replicas:
            print(f"replica {replica.number}, {replica.place}: {replica.request_count} live requests")
        for reader in readers:
            reader.cancel()  # ends the request on the server too


asyncio.run(main())
