"""`quire admin`: what an operator asks of a running server."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rpc.cli.connection import TokenFile, said, token_in

admin = typer.Typer(help="Look into a running server, on its admin port.", no_args_is_help=True)

Server = Annotated[str, typer.Option(help="HOST:PORT of AdminService: the admin port of `quire serve`.")]
Replica = Annotated[int, typer.Option(min=0, help="Which engine, where there are several.")]
SHOWN = {"FREE": ".", "HELD": "#", "CACHED": "o", "SET_ASIDE": "!"}
Number = Annotated[int, typer.Argument(min=0, help="Its number, as `quire cluster status` shows it.")]
RESTART_SECONDS = 3600
WIDTH = 64  # pages in a line


@admin.command("page-map")
def page_map(
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
    replica: Replica = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show what each KV page is used for, and who holds how many."""
    from google.protobuf.json_format import MessageToDict
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "GetPageMap", pb.GetPageMapRequest(replica=replica))
    if as_json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
        return
    states = [pb.PageState.Name(state).removeprefix("PAGE_STATE_") for state in answer.states]
    for start in range(0, len(states), WIDTH):
        print(f"{start:>8} {''.join(SHOWN[state] for state in states[start : start + WIDTH])}")
    counts = Counter(states)
    legend = ", ".join(f"{SHOWN[state]} {state.lower().replace('_', ' ')} {counts[state]}" for state in SHOWN)
    print(f"{len(states)} pages of {answer.page_size} tokens: {legend}")
    if answer.holders:
        table = Table("held by", "pages")
        for holder in answer.holders:
            name = f"step {holder.step}" if holder.HasField("step") else holder.request_id or "another server's request"
            table.add_row(name, str(len(holder.pages)))
        Console(markup=False).print(table)


@admin.command("reset-prefix-cache")
def reset_prefix_cache(server: Server = "127.0.0.1:50052", replica: Replica = 0, token_file: TokenFile = None) -> None:
    """Forget all cached KV. Running requests go on."""
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "ResetPrefixCache", pb.ResetPrefixCacheRequest(replica=replica))
    print(f"{answer.page_count} pages were forgotten")


@admin.command()
def drain(replica: Number, server: Server = "127.0.0.1:50052", token_file: TokenFile = None) -> None:
    """Move a replica's running requests to others and send it no new ones. Clients notice nothing."""
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "DrainReplica", pb.DrainReplicaRequest(replica=replica))
    print(f"{answer.moved_count} requests go on elsewhere; replica {replica} gets no new ones")


@admin.command()
def resume(replica: Number, server: Server = "127.0.0.1:50052", token_file: TokenFile = None) -> None:
    """Let a drained replica have requests again."""
    from quire.v1 import admin_service_pb2 as pb

    call(server, token_file, "ResumeReplica", pb.ResumeReplicaRequest(replica=replica))
    print(f"replica {replica} takes requests")


@admin.command()
def restart(replica: Number, server: Server = "127.0.0.1:50052", token_file: TokenFile = None) -> None:
    """Drain a replica and put a new engine in its place: one after the other, all are new and no request is lost."""
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "RestartReplica", pb.RestartReplicaRequest(replica=replica), RESTART_SECONDS)
    print(f"replica {replica} is new; {answer.moved_count} requests went on elsewhere, or waited")


@admin.command("requests")
def list_requests(
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
    most: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, the oldest ones.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show live requests: whose they are, what is done with them, how many tokens they have."""
    from google.protobuf.json_format import MessageToDict
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "ListRequests", pb.ListRequestsRequest(max_count=most))
    if as_json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
        return
    table = Table("request", "tenant", "state", "replica", "age", "prompt", "output")
    for one in answer.requests:
        state = pb.RequestState.Name(one.state).removeprefix("REQUEST_STATE_").lower()
        replica = str(one.replica) if one.HasField("replica") else "-"
        age = f"{one.age.ToMilliseconds() / 1000:.1f} s"
        tokens = (str(one.prompt_tokens), str(one.completion_tokens))
        table.add_row(one.request_id, one.tenant, state, replica, age, *tokens)
    Console(markup=False).print(table)
    print(f"{len(answer.requests)} of {answer.total_count} live requests")


@admin.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="As `quire admin requests` shows it.")],
    tenant: Annotated[str, typer.Option(help="Whose it is, where there are tokens.")] = "default",
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
) -> None:
    """End a live request. Its client gets what there is of it, and that it was aborted."""
    from quire.v1 import admin_service_pb2 as pb

    call(server, token_file, "CancelRequest", pb.CancelRequestRequest(request_id=request_id, tenant=tenant))
    print(f"request {request_id} has ended")


def call(server: str, token_file: Path | None, method: str, request: Any, seconds: float = 15) -> Any:
    import grpc
    from quire.v1 import admin_service_pb2_grpc as pb_grpc

    from rpc.client.channels import CHANNEL_OPTIONS
    from rpc.client.errors import error_of
    from rpc.client.security import Security

    try:
        security = Security(token_in(token_file))
        with security.channel(server, CHANNEL_OPTIONS) as channel:
            answering = getattr(pb_grpc.AdminServiceStub(channel), method)
            return answering(request, timeout=seconds, metadata=security.metadata)
    except (grpc.RpcError, ValueError, OSError) as error:
        shown = error_of(error, server) if isinstance(error, grpc.RpcError) else error
        typer.echo(f"quire: {said(shown, of_operators=True)}", err=True)
        raise typer.Exit(1) from None
