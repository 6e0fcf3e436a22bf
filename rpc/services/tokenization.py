"""quire.v1.TokenizationService over a `Frontend`'s tokenizer."""

from grpc import aio
from quire.v1 import tokenization_service_pb2 as pb
from quire.v1 import tokenization_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.access.authentication import NO_AUTHENTICATION, AuthenticationInterceptor
from rpc.frontend.frontend import Frontend
from rpc.services.errors import failures_to


class TokenizationService(pb_grpc.TokenizationServiceServicer):
    """Serves Tokenize and Detokenize. Calls count as work of the tokenizer, not as requests of the model."""

    def __init__(self, frontend: Frontend, authentication: AuthenticationInterceptor = NO_AUTHENTICATION) -> None:
        self._frontend, self._authentication = frontend, authentication

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: pb.TokenizeRequest, context: aio.ServicerContext
    ) -> pb.TokenizeResponse:
        async with failures_to(context, within=""):
            return await tokenized(self._frontend, request, self._authentication.authenticate(context).tenant)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with failures_to(context, within=""):
            return await detokenized(self._frontend, request, self._authentication.authenticate(context).tenant)


async def tokenized(
    frontend: Frontend, request: pb.TokenizeRequest, tenant: str = DEFAULT_TENANT
) -> pb.TokenizeResponse:
    """Answers Tokenize. Raises RequestFailed."""
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    ids = await frontend.in_worker(
        lambda limits: frontend.preparer.tokenize(request.text, special, request.model, limits), tenant=tenant
    )
    return pb.TokenizeResponse(token_ids=ids)


async def detokenized(
    frontend: Frontend, request: pb.DetokenizeRequest, tenant: str = DEFAULT_TENANT
) -> pb.DetokenizeResponse:
    """Answers Detokenize. Raises RequestFailed.

    A server that drains answers too: a gateway asks for the texts of the tokens of an answer that is still being given.
    """
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    text = await frontend.in_worker(
        lambda limits: frontend.preparer.detokenize(request.token_ids, skip, request.model, limits),
        tenant=tenant,
        of_live=True,
    )
    return pb.DetokenizeResponse(text=text)
