"""POST of either endpoint: reads the request, asks the servers, sends the response whole or as events."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from pydantic import ValidationError
from quire.v1 import generation_service_pb2 as pb
from starlette.types import Scope

from rpc.client.failures import failure_of
from rpc.client.security import Metadata
from rpc.frontend.pacing import Pacer
from rpc.gateway.answers import ApiResponse, Piece
from rpc.gateway.bodies import Bodies
from rpc.gateway.errors import ApiError, of_call, of_validation
from rpc.gateway.exchange import HttpExchange
from rpc.gateway.overlong import for_prompt
from rpc.gateway.parameters import names_of
from rpc.gateway.schema import CommonRequest
from rpc.gateway.served import ServedModels
from rpc.gateway.upstream import Upstream, merged


class EventEncoder(Protocol):
    """Encodes the events of one response."""

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        """Returns the events of some pieces, concatenated."""

    def end(self) -> bytes:
        """Returns the last events."""

    def failed(self, error: ApiError) -> bytes:
        """Returns the event of a failure that came after the first one."""


class Endpoint:
    """One endpoint as an ASGI application.

    Args:
        read: Reads a request from the JSON value of a body.
        response: Class of its responses.
        encoder: Makes the encoder of a response's events.
        upstream: The servers.
        served: Models and token texts of the servers.
        bodies: Limits of request bodies, shared by all endpoints.
    """

    def __init__(
        self,
        read: Callable[[object], CommonRequest],
        response: Callable[[Any, ServedModels, Metadata], ApiResponse],
        encoder: Callable[[Any], EventEncoder],
        upstream: Upstream,
        served: ServedModels,
        bodies: Bodies,
    ) -> None:
        self._read, self._response, self._encoder = read, response, encoder
        self._upstream, self._served, self._bodies = upstream, served, bodies
        self._pacer = Pacer()

    async def __call__(self, scope: Scope, *_: object) -> None:
        """Answers one request. Raises ApiError, grpc.RpcError, ClientGone."""
        exchange: HttpExchange = scope["exchange"]
        with self._bodies.held() as body:
            metadata = exchange.metadata()
            asked = self._asked(await self._bodies.read(body, exchange.headers, exchange.receive))
            if asked.request_id is not None:
                exchange.adopt(asked.request_id)
            response = self._response(asked, self._served, metadata)
            self._bodies.admit(body, response.calls)
            await exchange.while_there(self._respond(exchange, response, metadata))

    def _asked(self, value: object) -> CommonRequest:
        """Checks a body, and returns its request. Raises ApiError."""
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        try:
            return self._read(value)
        except ValidationError as error:
            raise of_validation(error) from None

    async def _respond(self, exchange: HttpExchange, response: ApiResponse, metadata: Metadata) -> None:
        """Runs all prompts, and sends the response. Raises ApiError."""
        try:
            requests = await response.begin()
            exchange.stats.model = response.model
            streams = [
                self._stream(exchange, response.asked, position, request, metadata)
                for position, request in enumerate(requests)
            ]
            async with aclosing(merged(streams)) as messages:
                if response.asked.stream:
                    await self._send_events(exchange, response, messages)
                else:
                    await self._send_whole(exchange, response, messages)
        except grpc.RpcError as error:
            raise of_call(failure_of(error), names_of(response.asked), response.asked.longest) from None

    async def _stream(
        self,
        exchange: HttpExchange,
        asked: CommonRequest,
        position: int,
        request: pb.StreamGenerateRequest,
        metadata: Metadata,
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """Yields the messages of one prompt. Raises ApiError, which names the prompt."""
        request.request_id = exchange.call_id(position)
        try:
            async with aclosing(self._upstream.stream(request, metadata)) as messages:
                async for message in messages:
                    exchange.stats.count_message(position, message)
                    yield message
        except grpc.RpcError as error:
            failure, context = failure_of(error), self._served.context(asked.model)
            if context is not None:
                failure = for_prompt(failure, request.spec, context)
            raise of_call(failure, names_of(asked, position), asked.longest) from None

    async def _send_whole(
        self,
        exchange: HttpExchange,
        response: ApiResponse,
        messages: AsyncGenerator[tuple[int, pb.StreamGenerateResponse], None],
    ) -> None:
        pieces: list[Piece] = []
        async for position, message in messages:
            pieces += await response.pieces_of(position, message)
        await exchange.reply(200, await self._pacer.run(response.body(pieces)))

    async def _send_events(
        self,
        exchange: HttpExchange,
        response: ApiResponse,
        messages: AsyncGenerator[tuple[int, pb.StreamGenerateResponse], None],
    ) -> None:
        """Sends pieces as events. A failure before the first message is a response of its own, a later one an event."""
        events = self._encoder(response)
        try:
            async for position, message in messages:
                made = events.encode(await response.pieces_of(position, message))
                if not exchange.begun:
                    await exchange.begin_events()
                if made:
                    await exchange.write(made)
            await exchange.write(events.end(), more=False)
        except (ApiError, grpc.RpcError) as error:
            if not exchange.begun:
                raise
            failure = (
                error
                if isinstance(error, ApiError)
                else of_call(failure_of(error), names_of(response.asked), response.asked.longest)
            )
            exchange.stats.error = failure.code or failure.kind
            await exchange.write(events.failed(failure), more=False)
