"""`quire admin`: an operator's commands to a running server."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rpc.cli.connection import TokenFile, said, token_in
from rpc.cli.tables import print_table

if TYPE_CHECKING:
    from quire.v1 import admin_service_pb2

admin = typer.Typer(help="Look into a running server, on its admin port.", no_args_is_help=True)

Server = Annotated[str, typer.Option(help="HOST:PORT of AdminService: the admin port of `quire serve`.")]
Replica = Annotated[int, typer.Option(min=0, help="Number of the engine, if there are several.")]
Number = Annotated[int, typer.Argument(min=0, help="Number of the replica in `quire cluster status`.")]
RESTART_SECONDS = 3600
MAP_WIDTH, MAP_LINES = 64, 16  # characters of the page map
MOST_LISTED = 1000  # requests in a response
MOST_NAMED = 5  # requests in an error


@admin.command("page-map")
def page_map(
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
    replica: Replica = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show the use of the KV pages as a picture of the pool, and the pages that each request holds."""
    from google.protobuf.json_format import MessageToDict
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "GetPageMap", pb.GetPageMapRequest(replica=replica))
    if as_json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
        return
    print("\n".join(_picture(answer)))
    if answer.holders:
        rows = ((_holder(holder), str(len(holder.pages))) for holder in answer.holders)
        print_table(("held by", "pages"), rows, elastic=("held by",), right=("pages",))


def _picture(answer: "admin_service_pb2.GetPageMapResponse") -> Iterator[str]:
    """Yields lines: the pool, with one or several adjacent pages in a character, and a legend."""
    import numpy as np
    from quire.v1 import admin_service_pb2 as pb

    from rpc.terminal.cells import CACHED, FREE, HELD, SET_ASIDE, folded

    each, cells = folded(np.array(answer.states, np.uint8), MAP_WIDTH * MAP_LINES)
    for start in range(0, len(cells), MAP_WIDTH):
        yield f"{start * each:>8} {''.join(cell.glyph for cell in cells[start : start + MAP_WIDTH])}"
    counts = Counter(answer.states)
    yield f"{len(answer.states)} pages of {answer.page_size} tokens, {each} in a character:"
    yield (
        f"{FREE} free {counts[pb.PAGE_STATE_FREE]}, {HELD} held {counts[pb.PAGE_STATE_HELD]}, "
        f"{CACHED} cached {counts[pb.PAGE_STATE_CACHED]}, {SET_ASIDE} set aside {counts[pb.PAGE_STATE_SET_ASIDE]}"
    )


def _holder(holder: "admin_service_pb2.PageHolder") -> str:
    if holder.HasField("step"):
        return f"step {holder.step}"
    return holder.request_id or "another server's request"


@admin.command("reset-prefix-cache")
def reset_prefix_cache(server: Server = "127.0.0.1:50052", replica: Replica = 0, token_file: TokenFile = None) -> None:
    """Forget all cached KV. Running requests go on."""
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "ResetPrefixCache", pb.ResetPrefixCacheRequest(replica=replica))
    print(f"{answer.page_count} pages were forgotten")


@admin.command()
def drain(replica: Number, server: Server = "127.0.0.1:50052", token_file: TokenFile = None) -> None:
    """Move a replica's running requests to others, and send it no new ones. Clients notice nothing."""
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
    """Drain a replica and start a new engine in its place. Replicas restarted in turn lose no request."""
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "RestartReplica", pb.RestartReplicaRequest(replica=replica), RESTART_SECONDS)
    print(f"replica {replica} is new; {answer.moved_count} requests went on elsewhere, or waited")


@admin.command("requests")
def list_requests(
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
    most: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="Requests to show at most, the oldest ones.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show live requests with tenant, state, age and token counts."""
    from google.protobuf.json_format import MessageToDict
    from quire.v1 import admin_service_pb2 as pb

    answer = call(server, token_file, "ListRequests", pb.ListRequestsRequest(max_count=most))
    if as_json:
        print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
        return
    figures = ("replica", "age", "prompt", "output")
    rows = [
        (
            one.request_id,
            one.tenant,
            pb.RequestState.Name(one.state).removeprefix("REQUEST_STATE_").lower(),
            str(one.replica) if one.HasField("replica") else "-",
            f"{one.age.ToMilliseconds() / 1000:.1f} s",
            str(one.prompt_tokens),
            str(one.completion_tokens),
        )
        for one in answer.requests
    ]
    print_table(("request", "tenant", "state", *figures), rows, elastic=("request", "tenant"), right=figures)
    print(f"{len(answer.requests)} of {answer.total_count} live requests")


@admin.command()
def cancel(
    request_id: Annotated[
        str, typer.Argument(help="Request id in `quire admin requests`, or a prefix that only one of them has.")
    ],
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant of the request. Unset: the only one with such a request.", show_default=False),
    ] = None,
    server: Server = "127.0.0.1:50052",
    token_file: TokenFile = None,
) -> None:
    """End a live request. Its client gets the output so far, with the finish reason of an abort."""
    from quire.v1 import admin_service_pb2 as pb

    listed = call(server, token_file, "ListRequests", pb.ListRequestsRequest(max_count=MOST_LISTED))
    try:
        cancelled = _cancel_request(listed, request_id, tenant)
    except ValueError as error:
        stop(error)
    call(server, token_file, "CancelRequest", cancelled)
    print(f"request {cancelled.request_id} has ended")


def _cancel_request(
    listed: "admin_service_pb2.ListRequestsResponse", given: str, tenant: str | None
) -> "admin_service_pb2.CancelRequestRequest":
    """Returns the message that cancels the live request with this id or prefix. Raises ValueError for several."""
    from quire.v1 import admin_service_pb2 as pb

    found = [one for one in listed.requests if one.request_id.startswith(given) and tenant in (None, one.tenant)]
    exact = [one for one in found if one.request_id == given]
    if len(found) > 1 and len(exact) != 1:
        which = ", ".join(f"{one.request_id} ({one.tenant})" for one in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise ValueError(f"{given!r} may be {which}{more}: give more of its id, or a --tenant")
    if found and not exact and listed.total_count > len(listed.requests):
        raise ValueError(
            f"only {len(listed.requests)} of {listed.total_count} live requests were looked at: give the whole id"
        )
    if not found:  # the server knows better: the list may have been cut
        return pb.CancelRequestRequest(request_id=given, tenant=tenant or "")
    (one,) = exact or found
    return pb.CancelRequestRequest(request_id=one.request_id, tenant=one.tenant)


def call(server: str, token_file: Path | None, method: str, request: Any, seconds: float = 15) -> Any:
    """Calls a method of AdminService, and returns its response. A failure ends the command."""
    import grpc
    from quire.v1 import admin_service_pb2_grpc as pb_grpc

    from rpc.client.channels import CHANNEL_OPTIONS
    from rpc.client.errors import error_of
    from rpc.client.security import Security

    try:
        security = Security(token_in(token_file))
        with security.channel(server, CHANNEL_OPTIONS) as channel:
            stub = pb_grpc.AdminServiceStub(channel)
            return getattr(stub, method)(request, timeout=seconds, metadata=security.metadata)
    except (grpc.RpcError, ValueError, OSError) as error:
        stop(error_of(error, server) if isinstance(error, grpc.RpcError) else error)


def stop(error: Exception) -> NoReturn:
    """Prints an error, and ends the command with status 1."""
    typer.echo(f"quire: {said(error, of_operators=True)}", err=True)
    raise typer.Exit(1) from None
