"""Credentials of a client: the token it sends, and the certificates that it checks and shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from rpc.addresses import check_server, is_loopback

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials of a client's calls.

    Attributes:
        token: A token of the server's --token-file; "" sends none.
        tls: Whether to use TLS; `roots` or `chain` imply it.
        roots: PEM of the authorities that may sign the server's certificate; None takes gRPC's default ones.
        chain: PEM of the client's own certificate, for servers that ask for one (mTLS).
        key: PEM of its key.
        plaintext: Whether the token may go to other machines without TLS.

    Raises:
        ValueError: A certificate without its key or the reverse, or a token with characters that no token has.
    """

    token: str = field(default="", repr=False)
    tls: bool = False
    roots: bytes | None = None
    chain: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    plaintext: bool = False

    def __post_init__(self) -> None:
        if (self.chain is None) != (self.key is None):
            raise ValueError("a certificate and its key go together")
        if self.token and (not self.token.isascii() or not self.token.isprintable() or " " in self.token):
            raise ValueError("the token has characters that are spaces or no printable ASCII")

    @property
    def metadata(self) -> Metadata:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self, server: str, options: Options) -> grpc.Channel:
        """Opens a connection to HOST:PORT.

        Raises:
            ValueError: The address is none, or the token could be read on its way.
        """
        credentials = self._credentials(server)
        if credentials is None:
            return grpc.insecure_channel(server, options=options)
        return grpc.secure_channel(server, credentials, options=options)

    def aio_channel(self, server: str, options: Options) -> aio.Channel:
        """Does the same as `channel` for asyncio."""
        credentials = self._credentials(server)
        if credentials is None:
            return aio.insecure_channel(server, options=options)
        return aio.secure_channel(server, credentials, options=options)

    def _credentials(self, server: str) -> grpc.ChannelCredentials | None:
        check_server(server)
        if not (self.tls or self.roots or self.chain):
            host = server.rpartition(":")[0].strip("[]")
            if self.token and not self.plaintext and not is_loopback(host):
                raise ValueError(f"the token could be read on its way to {server}: use TLS, or allow plaintext")
            return None
        return grpc.ssl_channel_credentials(self.roots, self.key, self.chain)


OPEN = Security()
"""Credentials for servers that ask for none."""
