"""The dashboard's paths, as an ASGI application."""

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cache_manager.ledger import PageState
from rpc.access.authentication import AuthenticationInterceptor
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.services.errors import as_failure
from rpc.services.load import page_map_of, requests_of, server_info
from rpc.web.errors import json_response, response_of
from rpc.web.guard import Guard
from rpc.web.history import History
from rpc.web.presence import while_there
from rpc.web.prompts import Prompts
from rpc.web.recorded import RecordedRequests

FILES = {
    "": ("index.html", "text/html"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
    "dashboard.css": ("dashboard.css", "text/css"),
}
REQUESTS = 30  # entries of the list of requests
LETTERS = {PageState.FREE: ".", PageState.HELD: "#", PageState.CACHED: "o", PageState.SET_ASIDE: "!"}
OF_STATE = bytes.maketrans(bytes(LETTERS), "".join(LETTERS.values()).encode())

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(
    frontend: Frontend,
    authentication: AuthenticationInterceptor,
    history: History,
    recorded: RecordedRequests | None = None,
) -> ASGIApp:
    """Returns the dashboard's application.

    Args:
        frontend: The server's frontend.
        authentication: Checks operators' tokens.
        history: Rates of the last minutes; the caller runs its `follow`.
        recorded: Recorded requests; None for a server that records none.
    """
    state_routes = StateRoutes(frontend, authentication, history, recorded)
    app = Starlette(
        routes=[
            *(Route(f"/{path}", _file(*file), methods=["GET"]) for path, file in FILES.items()),
            Route("/api/state", state_routes.endpoint(state_routes.state), methods=["GET"]),
            Route("/api/pages/{replica:int}", state_routes.endpoint(state_routes.pages), methods=["GET"]),
            Route("/api/recorded", state_routes.endpoint(state_routes.recorded), methods=["GET"]),
            Route("/api/recorded/{attempt}", state_routes.endpoint(state_routes.timeline), methods=["GET"]),
            Route("/api/generate", Prompts(frontend, authentication), methods=["POST"]),
        ],
    )
    return Guard(app)


def _file(name: str, kind: str) -> Endpoint:
    content = files("rpc.web").joinpath("static", name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


class StateRoutes:
    """The responses of AdminService for operators, as JSON of its messages, and timelines of recorded requests."""

    def __init__(
        self,
        frontend: Frontend,
        authentication: AuthenticationInterceptor,
        history: History,
        recorded: RecordedRequests | None,
    ) -> None:
        self._frontend, self._authentication, self._history = frontend, authentication, history
        self._recorded = recorded

    def endpoint(self, handler: Callable[[Request], Awaitable[dict[str, Any] | Response]]) -> Endpoint:
        """Returns an endpoint that checks the operator's token, and turns exceptions into responses."""

        async def answer(request: Request) -> Response:
            try:
                self._authentication.authenticate_operator(request.headers)
                answer = await handler(request)
                return answer if isinstance(answer, Response) else json_response(answer)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                return response_of(as_failure(error))

        return answer

    async def state(self, request: Request) -> dict[str, Any]:
        """Returns the server's state without page maps.

        The query's `after` is the number of the newest rates that the browser has.
        """
        after = _number(request.query_params.get("after", "0"), "after")
        return {
            "time": time.time(),
            "run": self._history.run,
            "info": _json(server_info(self._frontend)),
            "chat": self._frontend.preparer.chat is not None,
            "load": _json(self._history.load()),
            "requests": _json(requests_of(self._frontend, REQUESTS)),
            "rates": self._history.since(after),
            "records": self._recorded is not None,
        }

    async def pages(self, request: Request) -> dict[str, Any]:
        """Returns the page map of one engine: a letter for each page."""
        pages = await page_map_of(self._frontend, request.path_params["replica"])
        states = pages.states.tobytes().translate(OF_STATE).decode()
        return {"page_size": pages.page_size, "states": states, "holders": len(pages.holders)}

    async def recorded(self, _request: Request) -> dict[str, Any]:
        """Returns the requests that were recorded lately."""
        return {"requests": self._recorder.listed()}

    async def timeline(self, request: Request) -> Response:
        """Returns the timeline of one recorded request. Raises ClientDisconnect where its client leaves first."""
        work = self._recorder.timeline(_number(request.path_params["attempt"], "attempt"))
        return Response(await while_there(request.receive, work), media_type="application/json")

    @property
    def _recorder(self) -> RecordedRequests:
        if self._recorded is None:
            raise RequestFailed("NOT_FOUND", "NOT_RECORDED", "this server has no --record")
        return self._recorded


def _number(text: str, field: str) -> int:
    """Returns a number of a path or a query. Raises RequestFailed."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", f"{field} must be a number", field=field)
    return int(text)


def _json(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
