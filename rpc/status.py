"""Failures as google.rpc.Status: each has an ErrorInfo with a stable reason, and further details for the client."""

import asyncio
from typing import NoReturn

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

from rpc.frontend.errors import RequestFailed

DOMAIN = "quire"
LONGEST, LONGEST_NAME = 1000, 200
"""Most bytes of a message, and of a field's or model's name. Each is sent twice in the trailing metadata, which has
room for 8 KiB: once with three bytes for each byte that is not ASCII, once in base64."""

OUTSIDE_SPEC = ("request_id", "requests", "stream_options.max_delay")


def status_of(failure: RequestFailed, within: str = "spec.") -> status_pb2.Status:
    """Returns the status of a failure.

    Args:
        failure: The failure.
        within: Path, from the request, of the message that the failure's field is in.
    """
    message, field = _cut(failure.message, LONGEST), _cut(failure.field, LONGEST_NAME)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN)]
    if failure.code == "INVALID_ARGUMENT":
        path = field if field in OUTSIDE_SPEC else within + field
        violation = error_details_pb2.BadRequest.FieldViolation(field=path, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.reason == "MODEL_NOT_FOUND":
        details.append(error_details_pb2.ResourceInfo(resource_type="model", resource_name=field))
    if failure.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(failure.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=code_pb2.Code.Value(failure.code), message=message, details=[_packed(d) for d in details]
    )


def _cut(text: str, most: int) -> str:
    """Returns the beginning of a text, of at most `most` bytes in UTF-8."""
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: aio.ServicerContext, failure: RequestFailed, within: str = "spec.") -> NoReturn:
    """Ends the call with the failure's status; does not return."""
    status = rpc_status.to_status(status_of(failure, within))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except aio.InternalError:  # the client has left, and gRPC is about to cancel the call
        raise asyncio.CancelledError from None
    raise failure  # `abort` has raised
