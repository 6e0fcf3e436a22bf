"""Refuses requests to the dashboard that are not its own, on this machine.

Every web site that a browser on this machine shows can reach a loopback port. The check of Host keeps out sites whose
name resolves to this machine (DNS rebinding). The checks of Origin and Sec-Fetch-Site keep out all others. There is no
CORS header, and no cookie that a browser would add by itself.
"""

import re
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")  # any port: it may be a tunnel's
OWN_SITE = {"same-origin", "none"}  # none: the address bar
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Guard:
    """ASGI application that refuses foreign requests to another one, and adds security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = refusal([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
        app = self._app if why is None else PlainTextResponse(f"{why}\n", 403)
        await app(scope, receive, with_headers)


def refusal(headers: list[tuple[str, str]]) -> str | None:
    """Returns why a request with these headers is refused; None if it is not. Names are in lower case."""
    once: Mapping[str, str] = dict(headers)
    if sum(name in ("host", "origin") for name, _ in headers) > len(once.keys() & {"host", "origin"}):
        return "Host and Origin may be there once"
    host = once.get("host", "")
    if not HOST.fullmatch(host):
        return "the dashboard is for http://127.0.0.1 and http://localhost alone"
    if "origin" in once and once["origin"] != f"http://{host}":
        return "requests from other sites are refused"
    if once.get("sec-fetch-site", "none") not in OWN_SITE:
        return "requests from other sites are refused"
    return None
