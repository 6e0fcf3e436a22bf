"""The gateway's paths, as an ASGI application."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rpc.distribution import own_version
from rpc.gateway.bodies import Bodies
from rpc.gateway.chat import ChatCompletion
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.completions import Completion
from rpc.gateway.endpoint import Endpoint
from rpc.gateway.errors import ApiError
from rpc.gateway.exchange import Exchange, failures_to
from rpc.gateway.logprobs import as_json
from rpc.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from rpc.gateway.served import Served
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.upstream import Upstream
from rpc.gateway.watching import Watching

OWNER = "quire"


class Gateway:
    """An ASGI application in front of these servers. What it runs finds its exchange in the scope."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings, watching: Watching) -> None:
        self._watching = watching
        served = Served(upstream)
        parts = upstream, served, Bodies(settings)
        questions = Questions(upstream, served)
        routes = [
            Route("/v1/completions", Endpoint(CompletionRequest, Completion, *parts), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(ChatRequest, ChatCompletion, *parts), methods=["POST"]),
            Route("/v1/models", Answered(questions.models), methods=["GET"]),
            Route("/v1/models/{name:path}", Answered(questions.model), methods=["GET"]),
            Route("/health", Answered(questions.health), methods=["GET"]),
            Route("/version", Answered(questions.version), methods=["GET"]),
        ]
        if settings.shows_metrics:
            routes.append(Route("/metrics", MetricsText(watching.metrics), methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        scope.update(exchange=exchange, app=self)  # with an "app" the router raises what it does not find
        with self._watching.watched(exchange):
            async with failures_to(exchange):
                exchange.check()
                try:
                    await self._router(scope, receive, send)
                except HTTPException as error:
                    raise _no_path(scope, error) from None


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins ("*": of all) use it from a browser."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class Questions:
    """What is answered at once, with a status and JSON, or nothing."""

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

    async def health(self, exchange: Exchange) -> tuple[int, None]:
        """200 where a server serves, without a body, as vLLM says it."""
        del exchange
        return (200 if await self._upstream.healthy() else 503), None

    async def version(self, exchange: Exchange) -> tuple[int, Any]:
        """The gateway's own."""
        del exchange
        return 200, {"version": own_version()}


class Answered:
    """A question as an ASGI application."""

    def __init__(self, question: Callable[[Exchange], Awaitable[tuple[int, Any]]]) -> None:
        self._question = question

    async def __call__(self, scope: Scope, *_: object) -> None:
        """Raises what the question raises."""
        exchange: Exchange = scope["exchange"]
        status, value = await self._question(exchange)
        if value is None:
            await exchange.reply(status, b"", [])
        else:
            await exchange.reply(status, as_json(value))


class MetricsText:
    """The metrics as an ASGI application."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, *_: object) -> None:
        exchange: Exchange = scope["exchange"]
        await exchange.reply(200, self._metrics.page(), [(b"content-type", CONTENT_TYPE)])


def _no_path(scope: Scope, error: HTTPException) -> ApiError:
    """What is asked is none of the gateway's paths."""
    code = "unknown_url" if error.status_code == 404 else None
    message = f"{scope['method'][:20]} {scope['path'][:200]}: {error.detail}"
    return ApiError(error.status_code, message, code=code, allow=(error.headers or {}).get("Allow"))
