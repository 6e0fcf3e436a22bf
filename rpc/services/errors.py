"""Turns a handler's exception into the status of its call."""

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
    """Ends the call with a status for any exception of the block.

    An unexpected exception becomes INTERNAL, and its text stays in the log.

    Args:
        context: Context of the call.
        within: Path of the message that a failure's field is in.
    """
    try:
        yield
    except aio.AbortError:
        raise
    except Exception as error:
        failure = as_failure(error)
        if isinstance(failure, SlowReader):  # gRPC takes no status before the client has read the last message
            await asyncio.wait({failure.writing})
        await abort(context, failure, within)


def as_failure(error: Exception) -> RequestFailed:
    """Returns the failure that a client gets for an exception; logs an unexpected one, whose text stays in the log."""
    if isinstance(error, RequestFailed):
        return error
    log.error("a request failed in its handler", exc_info=error)
    return internal()
