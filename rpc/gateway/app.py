"""The gateway's paths, as an ASGI application."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rpc.gateway.bodies import Bodies
from rpc.gateway.chat import ChatCompletion
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.completions import Completion
from rpc.gateway.endpoint import Endpoint
from rpc.gateway.errors import ApiError
from rpc.gateway.exchange import Exchange, failures_to
from rpc.gateway.logprobs import as_json
from rpc.gateway.served import Served
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.upstream import Upstream

OWNER = "quire"


def make_app(upstream: Upstream, settings: GatewaySettings) -> Starlette:
    """upstream: the servers behind it."""
    served = Served(upstream)
    parts = upstream, served, Bodies(settings), settings
    questions = Questions(upstream, served)
    return Starlette(
        routes=[
            Route("/v1/completions", Endpoint(CompletionRequest, Completion, *parts), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(ChatRequest, ChatCompletion, *parts), methods=["POST"]),
            Route("/v1/models", Answered(questions.models), methods=["GET"]),
            Route("/v1/models/{name:path}", Answered(questions.model), methods=["GET"]),
            Route("/health", Answered(questions.health), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _no_path},
    )


class Questions:
    """What is answered at once, with a status and JSON."""

    def __init__(self, upstream: Upstream, served: Served) -> None:
        self._upstream, self._served = upstream, served

    async def models(self, exchange: Exchange) -> tuple[int, Any]:
        """All of them. Raises grpc.RpcError."""
        return 200, {"object": "list", "data": list((await self._listed(exchange)).values())}

    async def model(self, exchange: Exchange) -> tuple[int, Any]:
        """The one that the path names. Raises ApiError, grpc.RpcError."""
        models, name = await self._listed(exchange), exchange.path_parameters["name"]
        if name not in models:
            known = ", ".join(map(repr, models))
            raise ApiError(404, f"model {name[:100]!r} is not served here, {known} is", "model", code="model_not_found")
        return 200, models[name]

    async def _listed(self, exchange: Exchange) -> dict[str, dict[str, Any]]:
        """By name, in OpenAI's form, with vLLM's word for the longest prompt and output."""
        models = await self._served.models(exchange.metadata())
        return {
            name: {
                "id": name,
                "object": "model",
                "created": self._served.since,
                "owned_by": OWNER,
                "max_model_len": model.max_model_length,
            }
            for name, model in models.items()
        }

    async def health(self, exchange: Exchange) -> tuple[int, Any]:
        """200 where a server serves."""
        del exchange
        serving = await self._upstream.healthy()
        return (200, {"status": "SERVING"}) if serving else (503, {"status": "NOT_SERVING"})


class Answered:
    """A question as an ASGI application."""

    def __init__(self, question: Callable[[Exchange], Awaitable[tuple[int, Any]]]) -> None:
        self._question = question

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        async with failures_to(exchange):
            status, value = await self._question(exchange)
            await exchange.reply(status, as_json(value))


async def _no_path(request: Request, error: Exception) -> Response:
    """What is asked is none of the gateway's paths."""
    if not isinstance(error, HTTPException):
        raise error
    code = "unknown_url" if error.status_code == 404 else None
    told = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}", code=code)
    return Response(told.body, told.status, dict(error.headers or {}), "application/json")
