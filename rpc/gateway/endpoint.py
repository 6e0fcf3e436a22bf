"""POST of either endpoint: reads the request, asks the servers, answers whole or in parts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
from pydantic import ValidationError
from quire.v1 import generation_service_pb2 as pb
from starlette.types import Scope

from rpc.client.failures import failure_of
from rpc.client.security import Metadata
from rpc.frontend.pacing import Pacer
from rpc.gateway.answers import Answer, Piece
from rpc.gateway.bodies import Bodies
from rpc.gateway.errors import ApiError, of_call, of_validation
from rpc.gateway.exchange import Exchange
from rpc.gateway.logprobs import answer_as_json
from rpc.gateway.overlong import for_prompt
from rpc.gateway.parameters import names_of
from rpc.gateway.schema import Asked
from rpc.gateway.served import Served
from rpc.gateway.sse import DONE, Events, error_event
from rpc.gateway.upstream import Upstream, merged


class Endpoint:
    """An ASGI application. schema: of its requests. answer: that it makes of one."""

    def __init__(
        self,
        schema: type[Asked],
        answer: type[Answer],
        upstream: Upstream,
        served: Served,
        bodies: Bodies,
    ) -> None:
        self._schema, self._make_answer = schema, answer
        self._upstream, self._served, self._bodies = upstream, served, bodies
        self._pacer = Pacer()

    async def __call__(self, scope: Scope, *_: object) -> None:
        """Raises ApiError, grpc.RpcError, ClientGone."""
        exchange: Exchange = scope["exchange"]
        with self._bodies.held() as body:
            metadata = exchange.metadata()
            asked = self._asked(await self._bodies.read(body, exchange.headers, exchange.receive))
            if asked.request_id is not None:
                exchange.adopt(asked.request_id)
            answer = self._make_answer(asked, self._served, metadata)
            self._bodies.admit(body, answer.calls)
            await exchange.while_there(self._answer(exchange, answer, metadata))

    def _asked(self, value: object) -> Asked:
        """Raises ApiError."""
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        try:
            return self._schema.model_validate(value)
        except ValidationError as error:
            raise of_validation(error) from None

    async def _answer(self, exchange: Exchange, answer: Answer, metadata: Metadata) -> None:
        """Raises ApiError."""
        try:
            requests = await answer.begin()
            exchange.stats.model = answer.model
            streams = [
                self._stream(exchange, answer.asked, position, request, metadata)
                for position, request in enumerate(requests)
            ]
            async with aclosing(merged(streams)) as messages:
                if answer.asked.stream:
                    await self._stream_out(exchange, answer, messages)
                else:
                    await self._whole(exchange, answer, messages)
        except grpc.RpcError as error:
            raise of_call(failure_of(error), names_of(answer.asked), answer.asked.longest) from None

    async def _stream(
        self, exchange: Exchange, asked: Asked, position: int, request: pb.StreamGenerateRequest, metadata: Metadata
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """Of one prompt. Raises ApiError, which names it."""
        request.request_id = exchange.call_id(position)
        try:
            async with aclosing(self._upstream.stream(request, metadata)) as messages:
                async for message in messages:
                    exchange.stats.take(position, message)
                    yield message
        except grpc.RpcError as error:
            failure, context = failure_of(error), self._served.context(asked.model)
            if context is not None:
                failure = for_prompt(failure, request.spec, context)
            raise of_call(failure, names_of(asked, position), asked.longest) from None

    async def _whole(
        self,
        exchange: Exchange,
        answer: Answer,
        messages: AsyncGenerator[tuple[int, pb.StreamGenerateResponse], None],
    ) -> None:
        pieces: list[Piece] = []
        async for position, message in messages:
            pieces += await answer.take(position, message)
        await exchange.reply(200, await self._pacer.run(answer_as_json(answer.whole(pieces))))

    async def _stream_out(
        self,
        exchange: Exchange,
        answer: Answer,
        messages: AsyncGenerator[tuple[int, pb.StreamGenerateResponse], None],
    ) -> None:
        """What fails before the first token is an answer of its own, what fails later an event."""
        events = Events(answer)
        try:
            async for position, message in messages:
                made = events.of(await answer.take(position, message))
                if not exchange.begun:
                    await exchange.open()
                if made:
                    await exchange.write(made)
            await exchange.write(events.usage() + DONE, more=False)
        except (ApiError, grpc.RpcError) as error:
            if not exchange.begun:
                raise
            told = (
                error
                if isinstance(error, ApiError)
                else of_call(failure_of(error), names_of(answer.asked), answer.asked.longest)
            )
            exchange.stats.error = told.code or told.kind
            await exchange.write(error_event(told.body), more=False)
