"""Reads the google.rpc details of a failed call, for any client of quire.v1. Imports no torch."""

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

TRAILER = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call's status and details.

    Attributes:
        code: gRPC status code.
        message: The status's message.
        reason: Reason of its ErrorInfo; "" if Quire did not write the status.
        field: Field of its BadRequest, as a path from the request.
        retry_after: Seconds of its RetryInfo; None without one.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    field: str = ""
    retry_after: float | None = None


def failure_of(error: grpc.RpcError) -> Failure:
    """Returns status and details of a failed call, sync or asyncio."""
    reason, field, retry_after = "", "", None
    for packed in _details(error):
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            packed.Unpack(info)
            reason = info.reason
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            packed.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else ""
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            packed.Unpack(retry)
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
    return Failure(error.code(), error.details() or "", reason, field, retry_after)


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    trailers: Any = error.trailing_metadata()
    for key, value in trailers or ():
        if key == TRAILER:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:  # a proxy wrote the trailer
                return []
    return []
