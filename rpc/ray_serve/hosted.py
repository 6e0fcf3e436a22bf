"""Adapts the gateway to ASGI servers other than its own, such as Ray Serve's."""

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send


class AnswerCutError(RuntimeError):
    """A begun response cannot be finished; the server that runs the application ends the connection."""


class HostedGateway:
    """ASGI application around the gateway's.

    The gateway's own server gives each request a `cut` that ends its connection, and sends no lifespan events. Other
    servers do neither.

    Attributes:
        close: Called when the server shuts the application down.
    """

    def __init__(self, gateway: ASGIApp, close: Callable[[], Awaitable[None]]) -> None:
        self._gateway = gateway
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises AnswerCutError, and ValueError for protocols other than HTTP."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the gateway speaks HTTP alone, and this is {scope['type']}")
        is_cut = False

        def cut() -> None:
            nonlocal is_cut
            is_cut = True

        state = {**scope.get("state", {}), "cut": cut}
        await self._gateway({**scope, "state": state}, receive, send)
        if is_cut:
            raise AnswerCutError("an answer broke off; the log says why")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})
