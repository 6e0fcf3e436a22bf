"""The page's paths, as an ASGI application."""

import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cache_manager.ledger import PageState
from rpc.access.door import Door
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.services.errors import as_failure
from rpc.services.load import page_map_of, requests_of, server_info
from rpc.web.errors import json_response, response_of
from rpc.web.guard import Guard
from rpc.web.history import History
from rpc.web.prompts import Prompts

FILES = {
    "": ("index.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
REQUESTS = 30  # in a list
LETTERS = {PageState.FREE: ".", PageState.HELD: "#", PageState.CACHED: "o", PageState.SET_ASIDE: "!"}
OF_STATE = bytes.maketrans(bytes(LETTERS), "".join(LETTERS.values()).encode())

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(frontend: Frontend, door: Door, history: History) -> ASGIApp:
    """history: somebody lets it follow."""
    looks = Looks(frontend, door, history)
    app = Starlette(
        routes=[
            *(Route(f"/{path}", _file(*file), methods=["GET"]) for path, file in FILES.items()),
            Route("/api/state", looks.answering(looks.state), methods=["GET"]),
            Route("/api/pages/{replica:int}", looks.answering(looks.pages), methods=["GET"]),
            Route("/api/generate", Prompts(frontend, door), methods=["POST"]),
        ],
    )
    return Guard(app)


def _file(name: str, kind: str) -> Endpoint:
    content = files("rpc.web").joinpath("static", name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


class Looks:
    """What AdminService says, for operators, in the JSON of its messages."""

    def __init__(self, frontend: Frontend, door: Door, history: History) -> None:
        self._frontend, self._door, self._history = frontend, door, history

    def answering(self, look: Callable[[Request], Awaitable[dict[str, Any]]]) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                self._door.operator(request.headers)
                return json_response(await look(request))
            except Exception as error:
                return response_of(as_failure(error))

        return answer

    async def state(self, request: Request) -> dict[str, Any]:
        """Everything but pages. Query: `after`, the number of the newest rates that are known."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "after must be a number", field="after")
        return {
            "time": time.time(),
            "run": self._history.run,
            "info": _json(server_info(self._frontend)),
            "chat": self._frontend.preparer.chat is not None,
            "load": _json(self._history.load()),
            "requests": _json(requests_of(self._frontend, REQUESTS)),
            "rates": self._history.since(int(after)),
        }

    async def pages(self, request: Request) -> dict[str, Any]:
        """Of one engine: a letter for each page."""
        pages = await page_map_of(self._frontend, request.path_params["replica"])
        states = pages.states.tobytes().translate(OF_STATE).decode()
        return {"page_size": pages.page_size, "states": states, "holders": len(pages.holders)}


def _json(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
