"""The intake of requests: from a client's `Spec` to a live request that is on its way to an engine."""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.frontend.accounting import Accounting
from rpc.frontend.dispatch import Dispatch
from rpc.frontend.errors import RequestFailed, internal, invalid
from rpc.frontend.live import Live
from rpc.frontend.quota import Quota
from rpc.frontend.settings import FrontendSettings
from rpc.frontend.stream import RequestStream
from scheduler.invalid import InvalidRequest
from scheduler.spec import Spec

Prepare = Callable[[Spec], Awaitable[tuple[RequestStream, list[bytes]]]]
"""Tokenizes and validates a request. Returns its stream and the block hashes of its prompt's pages."""


class RequestIntake:
    """Submits requests, and bounds the memory that their images hold until they end.

    Args:
        prepare: Prepares a request beside the loop.
        dispatch: Sends live requests to engines.
        accounting: Counts requests that are refused.
        settings: Times, and bounds of what clients may hold.
    """

    def __init__(
        self, prepare: Prepare, dispatch: Dispatch, accounting: Accounting, settings: FrontendSettings
    ) -> None:
        self._prepare, self._dispatch, self._accounting, self._settings = prepare, dispatch, accounting, settings
        self._image_memory = Quota(settings.image_memory, "bytes of images are held")

    async def submit(
        self, spec: Spec, request_id: str, time_remaining: float | None, streaming: bool, started: float
    ) -> Live:
        """Prepares a request and submits it. Returns it live, to be given to `release` at its end.

        Args:
            spec: The request as the client states it.
            request_id: Unique among the tenant's live requests.
            time_remaining: Seconds from `started` until the caller's own deadline; None: it has none.
            streaming: The caller takes output as it comes.
            started: Arrival of the request, seconds on the monotonic clock.

        Raises:
            RequestFailed: The request cannot be served. It is counted.
        """
        stream, hashes = await self._prepared(spec)
        now = time.monotonic()
        spent = now - started
        queue_timeout = [t - spent for t in (stream.request.queue_timeout, time_remaining) if t is not None]
        stream.request = replace(stream.request, queue_timeout=max(0.0, min(queue_timeout)) if queue_timeout else None)
        self._check_image_memory(stream.request.image_bytes, spec.tenant)
        live = Live(stream, request_id, started, streaming, hashes)
        live.queue_timeout = None if stream.request.queue_timeout is None else now + stream.request.queue_timeout
        live.deadline = math.inf if time_remaining is None else started + time_remaining
        if stream.ended:  # its output prefix has a stop string, so no engine has anything to compute
            live.wake()
        else:
            most = self._settings.request_time
            seconds = most if spec.max_time is None else min(spec.max_time, most)
            try:
                self._dispatch.submit(live, seconds - spent)
            except RequestFailed as failure:
                raise self._accounting.refused(failure, spec.tenant) from None
        self._image_memory.take(spec.tenant, stream.request.image_bytes)
        return live

    def release(self, live: Live) -> None:
        """Gives back the memory of a request's images, at its end."""
        self._image_memory.give_back(live.stream.spec.tenant, live.stream.request.image_bytes)

    def _check_image_memory(self, size: int, tenant: str) -> None:
        """Raises RequestFailed, and counts it, where the tenant may not hold this many bytes more."""
        most = self._settings.image_memory // (1 if tenant == DEFAULT_TENANT else 2)
        try:
            if size > most:
                raise invalid(InvalidRequest("images", f"{size} bytes in memory", f"at most {most} bytes"))
            if size:
                self._image_memory.check(tenant, size)
        except RequestFailed as failure:
            raise self._accounting.refused(failure, tenant) from None

    async def _prepared(self, spec: Spec) -> tuple[RequestStream, list[bytes]]:
        """Prepares a request. Raises RequestFailed, and counts it, where the request cannot be served."""
        try:
            with self._accounting.counting_cancel(spec.tenant):
                return await self._prepare(spec)
        except RequestFailed as failure:
            raise self._accounting.refused(failure, spec.tenant) from None
        except Exception:
            self._accounting.refused(internal(), spec.tenant)
            raise
