"""The gateway's paths, as an ASGI application."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rpc.distribution import own_version
from rpc.gateway.bodies import Bodies
from rpc.gateway.chat import ChatResponse
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.completions import CompletionResponse
from rpc.gateway.endpoint import Endpoint
from rpc.gateway.errors import ApiError
from rpc.gateway.exchange import HttpExchange, failures_to
from rpc.gateway.logprobs import as_json
from rpc.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from rpc.gateway.responses import ModelResponse, ResponseEvents
from rpc.gateway.responses_schema import read_responses
from rpc.gateway.served import ServedModels
from rpc.gateway.settings import GatewaySettings
from rpc.gateway.sse import Events
from rpc.gateway.upstream import Upstream
from rpc.gateway.watching import RequestObserver

OWNER = "quire"


class Gateway:
    """The gateway's ASGI application.

    Each route finds its `HttpExchange` as `scope["exchange"]`.
    """

    def __init__(self, upstream: Upstream, settings: GatewaySettings, watching: RequestObserver) -> None:
        self._watching = watching
        served = ServedModels(upstream)
        parts = upstream, served, Bodies(settings)
        questions = InfoRoutes(upstream, served)
        routes = [
            Route(
                "/v1/completions",
                Endpoint(CompletionRequest.model_validate, CompletionResponse, Events, *parts),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                Endpoint(ChatRequest.model_validate, ChatResponse, Events, *parts),
                methods=["POST"],
            ),
            Route("/v1/responses", Endpoint(read_responses, ModelResponse, ResponseEvents, *parts), methods=["POST"]),
            Route("/v1/models", InfoRoute(questions.models), methods=["GET"]),
            Route("/v1/models/{name:path}", InfoRoute(questions.model), methods=["GET"]),
            Route("/health", InfoRoute(questions.health), methods=["GET"]),
            Route("/version", InfoRoute(questions.version), methods=["GET"]),
        ]
        if settings.shows_metrics:
            routes.append(Route("/metrics", MetricsText(watching.metrics), methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send)
        scope.update(exchange=exchange, app=self)  # with an "app" the router raises HTTPException for unknown paths
        with self._watching.watched(exchange):
            async with failures_to(exchange):
                exchange.check()
                try:
                    await self._router(scope, receive, send)
                except HTTPException as error:
                    raise _no_path(scope, error) from None


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allows browser pages of these origins to use the application; "*" allows all."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class InfoRoutes:
    """Handlers of the small GET routes. Each returns an HTTP status and a JSON value, or None for no body."""

    def __init__(self, upstream: Upstream, served: ServedModels) -> None:
        self._upstream, self._served = upstream, served

    async def models(self, exchange: HttpExchange) -> tuple[int, Any]:
        """Lists all models. Raises grpc.RpcError."""
        return 200, {"object": "list", "data": list((await self._listed(exchange)).values())}

    async def model(self, exchange: HttpExchange) -> tuple[int, Any]:
        """Returns the model that the path names. Raises ApiError, grpc.RpcError."""
        models, name = await self._listed(exchange), exchange.path_parameters["name"]
        if name not in models:
            known = ", ".join(map(repr, models))
            raise ApiError(404, f"model {name[:100]!r} is not served here, {known} is", "model", code="model_not_found")
        return 200, models[name]

    async def _listed(self, exchange: HttpExchange) -> dict[str, dict[str, Any]]:
        """Returns the models by name, in OpenAI's form with vLLM's `max_model_len`."""
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

    async def health(self, exchange: HttpExchange) -> tuple[int, None]:
        """Returns 200 if a server serves, else 503; without a body, like vLLM."""
        del exchange
        return (200 if await self._upstream.healthy() else 503), None

    async def version(self, exchange: HttpExchange) -> tuple[int, Any]:
        """Returns the gateway's version."""
        del exchange
        return 200, {"version": own_version()}


class InfoRoute:
    """A handler of `InfoRoutes` as an ASGI application."""

    def __init__(self, handler: Callable[[HttpExchange], Awaitable[tuple[int, Any]]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, *_: object) -> None:
        """Answers the request; the handler's exceptions pass through."""
        exchange: HttpExchange = scope["exchange"]
        status, value = await self._handler(exchange)
        if value is None:
            await exchange.reply(status, b"", [])
        else:
            await exchange.reply(status, as_json(value))


class MetricsText:
    """The metrics as an ASGI application."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, *_: object) -> None:
        exchange: HttpExchange = scope["exchange"]
        await exchange.reply(200, self._metrics.page(), [(b"content-type", CONTENT_TYPE)])


def _no_path(scope: Scope, error: HTTPException) -> ApiError:
    """Returns the error for a path or method that the gateway does not have."""
    code = "unknown_url" if error.status_code == 404 else None
    message = f"{scope['method'][:20]} {scope['path'][:200]}: {error.detail}"
    return ApiError(error.status_code, message, code=code, allow=(error.headers or {}).get("Allow"))
