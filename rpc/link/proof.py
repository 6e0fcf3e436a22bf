"""Mutual proof of a shared token: both ends of a call show that they know it, without sending it.

Another process can take a socket's name before its owner has it, or after its owner has ended. So a caller must neither
send its token there nor believe the answer. The caller sends a nonce with a keyed hash of it (HMAC-SHA256, RFC 2104).
The server sends another keyed hash of that nonce before anything else.
"""

import asyncio
import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import grpc

NONCE, PROOF = "quire-nonce", "quire-proof"
CALLER, ANSWERER = b"caller:", b"answerer:"
REFUSAL_SECONDS = 1.0  # longest wait for the reason of a refusal
Metadata = tuple[tuple[str, str], ...]


class StrangerError(ConnectionError):
    """The server of a call does not know the token."""


class TokenProof:
    """The caller's side of the proof, for one call.

    Args:
        token: The shared secret; "" where none is asked for.
    """

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_hex(16)

    @property
    def metadata(self) -> Metadata:
        """Metadata of the call: nonce and proof."""
        if not self._token:
            return ()
        return (NONCE, self._nonce), (PROOF, _proof(self._token, CALLER, self._nonce))

    async def check(self, call: Any) -> None:
        """Checks the server's proof, before anything else is read from the call.

        Args:
            call: Call of grpc.aio, from which nothing has been read.

        Raises:
            StrangerError: The server does not know the token.
            RpcError: The server refused the call.
        """
        answered = dict(await call.initial_metadata() or ())
        expected = _proof(self._token, ANSWERER, self._nonce)
        if not self._token or hmac.compare_digest(expected.encode(), str(answered.get(PROOF, "")).encode()):
            return
        try:
            async with asyncio.timeout(REFUSAL_SECONDS):
                code = await call.code()
        except TimeoutError:
            code = grpc.StatusCode.OK
        if code is not grpc.StatusCode.OK:
            await call.read()  # raises
        call.cancel()
        raise StrangerError("the peer does not know the token")


def answer_to(token: str, called: Mapping[str, object]) -> Metadata | None:
    """Returns the metadata with which a server answers a call first.

    Args:
        token: The shared secret; "" where none is asked for.
        called: Metadata of the call.

    Returns:
        The server's proof; None for a caller that does not know the token.
    """
    if not token:
        return ()
    nonce, shown = str(called.get(NONCE, "")), str(called.get(PROOF, ""))
    if not hmac.compare_digest(_proof(token, CALLER, nonce).encode(), shown.encode()):
        return None
    return ((PROOF, _proof(token, ANSWERER, nonce)),)


def _proof(token: str, who: bytes, nonce: str) -> str:
    return hmac.new(token.encode(), who + nonce.encode(), sha256).hexdigest()
