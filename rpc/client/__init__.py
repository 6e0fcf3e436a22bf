"""Python clients of a Quire server, exported as `quire.Client` and the like.

Imports neither torch nor the engine, and knows a server by its gRPC API alone.

from quire import Client

with Client("127.0.0.1:50051") as client:
    print(client.generate("First Citizen:", max_tokens=20, temperature=0).sequences[0].text)
    with client.stream([{"role": "user", "content": "Hello"}], max_tokens=100) as stream:
        for piece in stream.text():
            print(piece, end="", flush=True)
"""

from rpc.client.async_client import AsyncClient, AsyncStream
from rpc.client.client import Client, Stream
from rpc.client.errors import (
    AccessError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestIdLiveError,
    UnavailableError,
)
from rpc.client.security import Security

__all__ = [
    "AccessError",
    "AsyncClient",
    "AsyncStream",
    "CancelledError",
    "Client",
    "DeadlineError",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "QuireError",
    "RequestIdLiveError",
    "Security",
    "Stream",
    "UnavailableError",
]
