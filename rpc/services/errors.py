"""What a handler raises becomes the status that its call ends with."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc import aio

from rpc.frontend.errors import RequestFailed, internal
from rpc.services.writer import SlowReader
from rpc.status import abort

log = logging.getLogger("quire.rpc")


@asynccontextmanager
async def failures_to(context: aio.ServicerContext, within: str = "spec.") -> AsyncIterator[None]:
    """Ends the call with a status for whatever is raised; what nobody foresaw is INTERNAL, and its text stays here."""
    try:
        yield
    except aio.AbortError:
        raise
    except Exception as error:
        failure = as_failure(error)
        if isinstance(failure, SlowReader):  # until it has been read gRPC takes no status
            await asyncio.wait({failure.writing})
        await abort(context, failure, within)


def as_failure(error: Exception) -> RequestFailed:
    """What the client is told. The text of what nobody foresaw stays in the log."""
    if isinstance(error, RequestFailed):
        return error
    log.error("a request failed in its handler", exc_info=error)
    return internal()
