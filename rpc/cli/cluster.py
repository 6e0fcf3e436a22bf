"""`quire cluster`: shows the engines of a running server."""

import json
from typing import Annotated

import typer

from rpc.cli.admin import Server, call
from rpc.cli.connection import TokenFile
from rpc.cli.tables import print_table

cluster = typer.Typer(help="The engines of a running server.", no_args_is_help=True)


@cluster.callback()
def _root() -> None:
    pass


@cluster.command()
def status(
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show each replica: its state, its epoch, its pages and its queue."""
    from google.protobuf.json_format import MessageToDict
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "ListReplicas", pb.ListReplicasRequest())
    if as_json:
        fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps(fields))
        return
    columns = ("\nreplica", "\nstate", "\nepoch", "\nrequests", "\nrunning", "waiting\n(tokens)")
    pages, place = "pages held,\ncached, all", "\nplace"
    rows = []
    for one in answer.replicas:
        state = pb.ReplicaState.Name(one.state).removeprefix("REPLICA_STATE_").lower()
        used = f"{one.pages_used}, {one.pages_cached}, {one.pages_total}"
        waiting = f"{one.waiting} ({one.waiting_tokens})"
        row = (one.number, state, one.epoch, one.request_count, one.running, waiting, used, one.place)
        rows.append(tuple(map(str, row)))
    print_table((*columns, pages, place), rows, elastic=(place,))
