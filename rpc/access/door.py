"""The door of a server: every call passes it before its handler hears of it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc import aio

from rpc.access.policies import POLICIES, Policy
from rpc.access.tokens import ANYBODY, Caller, Tokens
from rpc.frontend.errors import RequestFailed
from rpc.status import abort


class Door(aio.ServerInterceptor):
    """tokens: None lets everybody in, as one tenant. policies: by the path of an rpc. denied: hears the reason of each
    call that is turned away.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        denied: Callable[[str], object],
        policies: Mapping[str, Policy] = POLICIES,
    ) -> None:
        self._tokens, self._denied, self._policies = tokens, denied, policies

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # gRPC says UNIMPLEMENTED
        refusal = self._refusal(handler_call_details)
        if refusal is None:
            return handler
        self._denied(refusal.reason.lower())
        return _refusing(refusal)

    def _refusal(self, details: grpc.HandlerCallDetails) -> RequestFailed | None:
        policy = self._policies.get(details.method)
        if policy is None:
            return RequestFailed("PERMISSION_DENIED", "NO_POLICY", f"{details.method} is open to nobody")
        if policy is Policy.OPEN:
            return None
        caller = self._caller(details.invocation_metadata)
        if caller is None:
            return no_token()
        return no_operator() if policy is Policy.OPERATOR and not caller.operator else None

    def operator(self, headers: Mapping[str, str]) -> Caller:
        """Who has sent these with a request that is no rpc. Raises RequestFailed, counted, for who is no operator."""
        caller = self._caller(headers)
        if caller is not None and caller.operator:
            return caller
        refusal = no_token() if caller is None else no_operator()
        self._denied(refusal.reason.lower())
        raise refusal

    def caller(self, context: aio.ServicerContext) -> Caller:
        """Whose call this is. Raises RequestFailed for a token that has just gone out of force."""
        caller = self._caller(context.invocation_metadata())
        if caller is None:
            raise no_token()
        return caller

    def _caller(self, metadata: Any) -> Caller | None:
        return ANYBODY if self._tokens is None else self._tokens.caller(dict(metadata or ()))


OPEN_DOOR = Door(None, lambda _reason: None)
"""Of services that ask nobody for a token."""


def no_token() -> RequestFailed:
    """One answer to all who have none of the tokens: what they showed is no concern of theirs."""
    message = "a token is needed: metadata `authorization: Bearer TOKEN`"
    return RequestFailed("UNAUTHENTICATED", "NO_TOKEN", message)


def no_operator() -> RequestFailed:
    """Who has a token, but not for this."""
    return RequestFailed("PERMISSION_DENIED", "NO_OPERATOR", "the token is not an operator's")


def _refusing(refusal: RequestFailed) -> grpc.RpcMethodHandler:
    async def refuse(_requests: object, context: aio.ServicerContext) -> None:
        await abort(context, refusal)

    # As a stream whatever the rpc is: nothing of its messages is read.
    return grpc.stream_stream_rpc_method_handler(refuse)
