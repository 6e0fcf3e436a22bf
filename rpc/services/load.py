"""Description and load of a server, as messages of quire.v1.AdminService."""

import time
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration
from quire.v1 import admin_service_pb2 as pb

from cache_manager.ledger import PageMap
from rpc.distribution import own_version
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.replicas import Replica
from scheduler.events import AdminQuestion


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def server_info(frontend: Frontend) -> pb.GetServerInfoResponse:
    """Describes the server. Raises RequestFailed where no engine was ever attached."""
    engine = frontend.info
    return pb.GetServerInfoResponse(
        version=own_version(),
        model=frontend.preparer.name,
        architecture=frontend.preparer.architecture,
        dtype=engine.dtype,
        device=engine.device,
        max_model_length=engine.limits.longest,
        page_size=engine.page_size,
        max_sequences=engine.limits.sequences,
    )


def load_of(frontend: Frontend, started: float) -> pb.Load:
    """Returns the load of the server, and its totals.

    Args:
        frontend: Frontend of the server.
        started: Start of the server, seconds on the monotonic clock.
    """
    totals = frontend.totals
    return pb.Load(
        uptime=duration(time.monotonic() - started),
        replicas=[replica_message(replica) for replica in frontend.replicas.newest],
        request_count=frontend.live_requests,
        tenants=_tenants(frontend),
        prompt_tokens_total=totals.prompt_tokens,
        cached_prompt_tokens_total=totals.cached_tokens,
        generation_tokens_total=totals.generation_tokens,
        first_tokens_total=totals.first_tokens,
        first_token_time_total=duration(totals.first_token_seconds),
        ended_requests_total=totals.ended_requests,
    )


def _tenants(frontend: Frontend) -> list[pb.TenantLoad]:
    loads: dict[str, pb.TenantLoad] = {}
    for (tenant, _), live in frontend.requests.items():
        load = loads.setdefault(tenant, pb.TenantLoad(tenant=tenant))
        load.request_count += 1
        load.waiting_count += live is None or not live.started_here
        load.tokens += 0 if live is None else live.stream.length
    return [loads[tenant] for tenant in sorted(loads)]


def requests_of(frontend: Frontend, most: int) -> pb.ListRequestsResponse:
    """Lists the oldest live requests, at most `most`."""

    def messages() -> Iterator[pb.LiveRequest]:
        for (tenant, request_id), live in list(frontend.requests.items())[:most]:
            yield _request(frontend, tenant, request_id, live)

    return pb.ListRequestsResponse(requests=messages(), total_count=frontend.live_requests)


def _request(frontend: Frontend, tenant: str, request_id: str, live: Live | None) -> pb.LiveRequest:
    if live is None:
        return pb.LiveRequest(request_id=request_id, tenant=tenant, state=pb.REQUEST_STATE_PREPARING)
    replica = frontend.replica_of(live)
    state = pb.REQUEST_STATE_RUNNING if live.started_here else pb.REQUEST_STATE_QUEUED
    return pb.LiveRequest(
        request_id=request_id,
        tenant=tenant,
        state=pb.REQUEST_STATE_PARKED if replica is None else state,
        age=duration(time.monotonic() - live.started),
        prompt_tokens=len(live.stream.request.prompt),
        completion_tokens=live.stream.token_count,
        replica=None if replica is None else replica.number,
    )


async def page_map_of(frontend: Frontend, replica: int) -> PageMap:
    """Asks an engine for its page map. Raises RequestFailed where it does not answer."""
    pages = (await frontend.ask(AdminQuestion.PAGE_MAP, replica)).page_map
    if pages is None:
        raise RequestFailed("INTERNAL", "NO_ANSWER", "the engine's answer has no page map")
    return pages


def replica_message(replica: Replica) -> pb.Replica:
    stats = replica.stats
    if not replica.usable or replica.client is None:
        return pb.Replica(number=replica.number, state=pb.REPLICA_STATE_STARTING, epoch=replica.epoch)
    return pb.Replica(
        number=replica.number,
        state=_state(replica),
        epoch=replica.epoch,
        place=replica.client.place,
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        pages_used=stats.pages_used,
        pages_total=replica.client.info.pages,
        pages_cached=stats.pages_cached,
        request_count=len(replica.waiting),
    )


def _state(replica: Replica) -> "pb.ReplicaState":
    if replica.drained or replica.leaving:
        return pb.REPLICA_STATE_DRAINED
    return pb.REPLICA_STATE_ISOLATED if replica.isolated else pb.REPLICA_STATE_SERVING
