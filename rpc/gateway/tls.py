"""TLS of a gateway: its certificate, which may be replaced while it serves, and its credentials for servers."""

import ssl
from pathlib import Path

from rpc.access.certificates import load_pair
from rpc.access.reloaded import Reloaded
from rpc.client.security import Security
from rpc.gateway.settings import GatewaySettings


def own_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Returns the context of the gateway's port; None without TLS.

    Each handshake uses the files' current content.

    Raises:
        ValueError: The files hold no certificate and its key.
        OSError: A file cannot be read.
    """
    if settings.tls_cert is None:
        return None
    chain = Path(settings.tls_cert)
    key = chain if settings.tls_key is None else Path(settings.tls_key)

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        load_pair(context, chain, key)
        return context

    contexts = Reloaded([chain] if key == chain else [chain, key], read)

    def renew(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Gives a handshake the current context. Each pair gets its own: loading a wrong pair spoils a context."""
        handshake.context = contexts.current()

    first = read()
    first.sni_callback = renew  # OpenSSL calls it also for clients that name no server
    return first


def security_of(settings: GatewaySettings) -> Security:
    """Returns the credentials for calls to servers, read once at the start.

    They have no token: calls carry those of the gateway's clients.

    Raises:
        ValueError: A file holds no certificate, or others can read its key.
        OSError: A file cannot be read.
    """
    roots = chain = key = None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if settings.server_ca is not None:
        roots = _authority(context, Path(settings.server_ca))
    if settings.server_cert is not None and settings.server_key is not None:
        files = Path(settings.server_cert), Path(settings.server_key)
        load_pair(context, *files, flags="--server")
        chain, key = (file.read_bytes() for file in files)
    return Security(tls=settings.server_tls, roots=roots, chain=chain, key=key)


def _authority(context: ssl.SSLContext, path: Path) -> bytes:
    try:
        context.load_verify_locations(path)
        return path.read_bytes()
    except ssl.SSLError as error:
        raise ValueError(f"--server-ca {path} has no certificate: {error}") from None
    except OSError as error:
        raise OSError(f"--server-ca {path} cannot be read: {error}") from None
