"""The gRPC handlers of the service's methods.

They are made from the descriptor, since messages in a descriptor pool of their own have no generated code.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from rpc.frontend.errors import RequestFailed
from rpc.services.inference import pb
from rpc.status import abort

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def handlers(service: object) -> grpc.GenericRpcHandler:
    """Returns handlers for `add_generic_rpc_handlers`. A method that `service` lacks is UNIMPLEMENTED."""
    made = {method.name: _handler(method, getattr(service, method.name, None)) for method in SERVICE.methods}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, made)


def _handler(method: MethodDescriptor, behaviour: Callable[..., Awaitable[Any]] | None) -> grpc.RpcMethodHandler:
    make = grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        behaviour or _unimplemented(method.name),
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _unimplemented(name: str) -> Callable[[Message, aio.ServicerContext], Awaitable[NoReturn]]:
    async def refuse(_request: Message, context: aio.ServicerContext) -> NoReturn:
        message = f"{name} is not supported: this server has one model and no shared memory, and is set up by flags"
        await abort(context, RequestFailed("UNIMPLEMENTED", "NOT_SUPPORTED", message))

    return refuse
