"""Authentication of a server's calls: every call passes the interceptor before its handler runs."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc import aio

from rpc.access.policies import POLICIES, Policy
from rpc.access.tokens import ANONYMOUS, AccessTokens, Principal
from rpc.frontend.errors import RequestFailed
from rpc.status import abort


class AuthenticationInterceptor(aio.ServerInterceptor):
    """Refuses calls whose token does not satisfy the policy of their rpc.

    Args:
        tokens: Tokens of the server; None: all callers are one anonymous tenant and operators.
        denied: Called with the reason of each call that is refused.
        policies: Policy of each rpc, by path. An rpc without one is refused to all callers.
    """

    def __init__(
        self,
        tokens: AccessTokens | None,
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
            return handler  # gRPC answers UNIMPLEMENTED itself
        refusal = self._refusal(handler_call_details)
        if refusal is None:
            return handler
        self._denied(refusal.reason.lower())
        return _refusing(refusal)

    def _refusal(self, details: grpc.HandlerCallDetails) -> RequestFailed | None:
        policy = self._policies.get(details.method)
        if policy is None:
            return RequestFailed("PERMISSION_DENIED", "NO_POLICY", f"{details.method} has no policy, so it is refused")
        if policy is Policy.OPEN:
            return None
        principal = self._principal_of(details.invocation_metadata)
        if principal is None:
            return no_token()
        return no_operator() if policy is Policy.OPERATOR and not principal.operator else None

    def authenticate_operator(self, headers: Mapping[str, str]) -> Principal:
        """Returns the operator that sent a request which is no rpc.

        Args:
            headers: HTTP headers of the request.

        Raises:
            RequestFailed: The headers have no operator's token. Counted as a refused call.
        """
        principal = self._principal_of(headers)
        if principal is not None and principal.operator:
            return principal
        refusal = no_token() if principal is None else no_operator()
        self._denied(refusal.reason.lower())
        raise refusal

    def authenticate(self, context: aio.ServicerContext) -> Principal:
        """Returns the principal of a call that the interceptor has let pass.

        Raises:
            RequestFailed: The token was removed since.
        """
        principal = self._principal_of(context.invocation_metadata())
        if principal is None:
            raise no_token()
        return principal

    def _principal_of(self, metadata: Any) -> Principal | None:
        return ANONYMOUS if self._tokens is None else self._tokens.principal_of(dict(metadata or ()))


NO_AUTHENTICATION = AuthenticationInterceptor(None, lambda _reason: None)
"""Interceptor of services that need no token."""


def no_token() -> RequestFailed:
    """Returns the refusal of a call without a known token. It is the same for all, so it says nothing of the token."""
    message = "a token is needed: metadata `authorization: Bearer TOKEN`"
    return RequestFailed("UNAUTHENTICATED", "NO_TOKEN", message)


def no_operator() -> RequestFailed:
    """Returns the refusal of a call whose token is not an operator's."""
    return RequestFailed("PERMISSION_DENIED", "NO_OPERATOR", "the token is not an operator's")


def _refusing(refusal: RequestFailed) -> grpc.RpcMethodHandler:
    async def refuse(_requests: object, context: aio.ServicerContext) -> None:
        await abort(context, refusal)

    # A stream handler for any rpc, since it ends a call without a read of its messages.
    return grpc.stream_stream_rpc_method_handler(refuse)
