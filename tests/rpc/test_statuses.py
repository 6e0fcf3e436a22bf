"""A failure as a status: it fits the trailing metadata, whatever a client wrote into what the failure names."""

from urllib.parse import quote

import pytest
from grpc_status import rpc_status

from rpc.frontend.errors import RequestFailed, invalid
from rpc.status import status_of
from scheduler.invalid import InvalidRequest

METADATA = 8192  # bytes of trailing metadata that clients take


@pytest.mark.parametrize("character", ["x", "\u4e2d", "\U0001f642", "\ud800"])
@pytest.mark.parametrize("reason", ["INVALID_FIELD", "MODEL_NOT_FOUND"])
def test_a_status_fits_the_trailing_metadata(character: str, reason: str) -> None:
    long = character * 100_000
    code = "INVALID_ARGUMENT" if reason == "INVALID_FIELD" else "NOT_FOUND"
    for failure in (RequestFailed(code, reason, long, field=long), invalid(InvalidRequest(long, long, long))):
        status = rpc_status.to_status(status_of(failure))
        sent = len(quote(status.details)) + sum(len(key) + 2 * len(value) for key, value in status.trailing_metadata)
        assert sent < METADATA
        assert status.details.endswith("...")
