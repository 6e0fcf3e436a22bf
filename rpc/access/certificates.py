"""TLS of a server whose certificate is replaced while it runs."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rpc.access.reloaded import Reloaded
from rpc.settings import ListenSettings


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate, as PEM texts.

    Attributes:
        chain: Certificate, and those of its issuers.
        key: Private key.
        client_ca: Certificate of the authority that signs clients' certificates; None: clients need none.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None = None

    def configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


def server_credentials(listen: ListenSettings) -> grpc.ServerCredentials | None:
    """Returns credentials whose handshakes use the files' content at their time; None without TLS.

    Raises:
        ValueError: The files hold no certificate and its key.
        OSError: A file cannot be read.
    """
    if listen.tls_cert is None or listen.tls_key is None:
        return None
    chain, key = Path(listen.tls_cert), Path(listen.tls_key)
    client_ca = None if listen.tls_client_ca is None else Path(listen.tls_client_ca)
    paths = [chain, key, *([client_ca] if client_ca is not None else [])]
    certificate = Reloaded(paths, lambda: read_certificate(chain, key, client_ca))
    in_use: list[Certificate] = [certificate.value]

    def fetch() -> Any:
        """Returns the configuration of a new certificate; None where it is the old one, as gRPC wants it."""
        now = certificate.current()
        if now is in_use[0]:
            return None
        in_use[0] = now
        return now.configuration()

    fetcher: Callable[[], Any] = fetch
    return grpc.dynamic_ssl_server_credentials(in_use[0].configuration(), fetcher, client_ca is not None)


def read_certificate(chain: Path, key: Path, client_ca: Path | None) -> Certificate:
    """Reads and checks a certificate.

    Args:
        chain: File of the certificate and its issuers'.
        key: File of the private key.
        client_ca: File of the authority of clients' certificates; None: clients need none.

    Raises:
        ValueError: The files hold no certificate and its key.
        OSError: A file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(context, chain, key)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"--tls-client-ca {client_ca} has no certificate: {error}") from None
    return Certificate(chain.read_bytes(), key.read_bytes(), None if client_ca is None else client_ca.read_bytes())


def load_pair(context: ssl.SSLContext, chain: Path, key: Path, flags: str = "--tls") -> None:
    """Loads a certificate and its key into a context, with errors that name the flags.

    Args:
        context: Context of the connections.
        chain: File of the certificate and its issuers'.
        key: File of the private key; it may be the file of the chain.
        flags: Beginning of the flags' names, before -cert and -key.

    Raises:
        ValueError: All users can read the key, it is encrypted, or it is not the certificate's.
        OSError: A file cannot be read.
    """
    named = f"{flags}-{'cert' if key == chain else 'key'} {key}"

    def password() -> str:
        raise ValueError(f"{named} is encrypted, and a server cannot ask for its password")

    try:
        if key.stat().st_mode & 0o007:
            raise ValueError(f"{named} can be used by every user of this machine: chmod o= {key}")
        context.load_cert_chain(chain, key, password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{flags}-cert {chain} and {flags}-key {key} are no certificate and its key: {error}"
        ) from None
    except OSError as error:
        raise OSError(f"{flags}-cert {chain} with its key cannot be read: {error}") from None
