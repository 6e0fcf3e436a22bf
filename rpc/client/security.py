"""How a client shows who it is, and sees that it talks to the right server."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from rpc.addresses import check_server, is_loopback

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Security:
    """Of a client's calls. token: as the server's --token-file has it. tls: the server has a certificate; implied by
    the others. roots: PEM of who signed it; None: whom the machine trusts. chain, key: PEM of a certificate of one's
    own, for servers that ask for one (mTLS). plaintext: the token may go to other machines without TLS.
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
            raise ValueError("the token has characters that no token has")

    @property
    def metadata(self) -> Metadata:
        """What goes with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self, server: str, options: Options) -> grpc.Channel:
        """To HOST:PORT. Raises ValueError where it is none, or the token could be read on its way."""
        credentials = self._credentials(server)
        if credentials is None:
            return grpc.insecure_channel(server, options=options)
        return grpc.secure_channel(server, credentials, options=options)

    def aio_channel(self, server: str, options: Options) -> aio.Channel:
        """The same for asyncio."""
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
"""For servers that ask for nothing."""
