"""How both ends of a call show that they know the same token, without saying it.

Names of sockets can be taken by others before their owner has them, or after it has ended: who calls there must not
hand over its token, nor believe what comes. The caller sends a number that is used once, with a keyed hash of it
(HMAC); who answers sends another hash of that number first.
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
REFUSAL_SECONDS = 1.0  # that the reason of a refusal may take to come
Metadata = tuple[tuple[str, str], ...]


class StrangerError(ConnectionError):
    """Who answers does not know the token."""


class Caller:
    """Of one call. token: "" where none is asked for."""

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_hex(16)

    @property
    def metadata(self) -> Metadata:
        """What goes with the call."""
        if not self._token:
            return ()
        return (NONCE, self._nonce), (PROOF, _proof(self._token, CALLER, self._nonce))

    async def check(self, call: Any) -> None:
        """call: of grpc.aio, of which nothing has been read. Raises StrangerError, and RpcError where it is refused."""
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
        raise StrangerError("who answers does not know the token")


def answer_to(token: str, called: Mapping[str, object]) -> Metadata | None:
    """What goes before all else; None for a caller that does not know the token."""
    if not token:
        return ()
    nonce, shown = str(called.get(NONCE, "")), str(called.get(PROOF, ""))
    if not hmac.compare_digest(_proof(token, CALLER, nonce).encode(), shown.encode()):
        return None
    return ((PROOF, _proof(token, ANSWERER, nonce)),)


def _proof(token: str, who: bytes, nonce: str) -> str:
    return hmac.new(token.encode(), who + nonce.encode(), sha256).hexdigest()
