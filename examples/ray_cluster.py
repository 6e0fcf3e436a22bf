"""Spreads requests over engines that are actors of a Ray cluster, and shows where they run.

    quire serve --ray --replicas 2                          # in another terminal; starts a cluster on this machine
    quire serve --ray-address HEAD:6379 --replicas 2        # or this, for a cluster that is there
    python examples/ray_cluster.py [--server HOST:PORT] [--admin HOST:PORT]

Clients see one server, which sends each request to the engine with the least to do. The admin port, which is the
operator's, says where the engines run. It is asked with the generated stubs of `quire.v1`, as any rpc can be.
"""

import argparse
from contextlib import ExitStack

import grpc
from quire import Client
from quire.v1 import admin_service_pb2, admin_service_pb2_grpc

parser = argparse.ArgumentParser()
parser.add_argument("--server", default="127.0.0.1:50051")
parser.add_argument("--admin", default="127.0.0.1:50052")
asked = parser.parse_args()

with Client(asked.server, timeout=60) as client, grpc.insecure_channel(asked.admin) as channel, ExitStack() as streams:
    for role in ("ROMEO", "JULIET", "MERCUTIO", "NURSE"):
        # No max_tokens and no end of text: a request that ended before the others began would have its engine free.
        stream = streams.enter_context(client.stream(f"{role}:", ignore_eos=True))
        print(f"{role} has begun: {''.join(delta.text for delta in next(stream).deltas)!r}")
    operator = admin_service_pb2_grpc.AdminServiceStub(channel)
    for replica in operator.ListReplicas(admin_service_pb2.ListReplicasRequest()).replicas:
        print(f"replica {replica.number}, {replica.place}: {replica.request_count} live requests")
    # Leaving the streams ends what is left of the requests.
