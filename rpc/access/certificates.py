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
    """PEM texts. client_ca: of whoever signs the certificates that clients have to show; None asks for none."""

    chain: bytes
    key: bytes
    client_ca: bytes | None = None

    def configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


def server_credentials(listen: ListenSettings) -> grpc.ServerCredentials | None:
    """Each handshake takes what the files hold by then; None without TLS. Raises ValueError where they hold no
    certificate and its key, OSError.
    """
    if listen.tls_cert is None or listen.tls_key is None:
        return None
    chain, key = Path(listen.tls_cert), Path(listen.tls_key)
    client_ca = None if listen.tls_client_ca is None else Path(listen.tls_client_ca)
    paths = [chain, key, *([client_ca] if client_ca is not None else [])]
    certificate = Reloaded(paths, lambda: read_certificate(chain, key, client_ca))
    told: list[Certificate] = [certificate.value]

    def fetch() -> Any:
        """None where nothing is new, as gRPC wants it."""
        now = certificate.current()
        if now is told[0]:
            return None
        told[0] = now
        return now.configuration()

    fetcher: Callable[[], Any] = fetch
    return grpc.dynamic_ssl_server_credentials(told[0].configuration(), fetcher, client_ca is not None)


def read_certificate(chain: Path, key: Path, client_ca: Path | None) -> Certificate:
    """Raises ValueError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(context, chain, key)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"--tls-client-ca {client_ca} has no certificate: {error}") from None
    return Certificate(chain.read_bytes(), key.read_bytes(), None if client_ca is None else client_ca.read_bytes())


def load_pair(context: ssl.SSLContext, chain: Path, key: Path, flags: str = "--tls") -> None:
    """Of --tls-cert and --tls-key, or what other flags begin with. key: may be in the file of the chain. Raises
    ValueError where everybody can read the key, it is encrypted, or not the certificate's, OSError.
    """
    named = f"{flags}-{'cert' if key == chain else 'key'} {key}"

    def password() -> str:
        raise ValueError(f"{named} is encrypted: there is nobody to ask for its password")

    try:
        if key.stat().st_mode & 0o007:
            raise ValueError(f"{named} can be used by everybody on this machine: chmod o= {key}")
        context.load_cert_chain(chain, key, password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{flags}-cert {chain} and {flags}-key {key} are no certificate and its key: {error}"
        ) from None
    except OSError as error:
        raise OSError(f"{flags}-cert {chain} with its key cannot be read: {error}") from None
