"""quire.v1.ModelService over a `Frontend`: describes the served model."""

from grpc import aio
from quire.v1 import model_service_pb2 as pb
from quire.v1 import model_service_pb2_grpc as pb_grpc

from rpc.frontend.frontend import Frontend
from rpc.services.errors import failures_to


class ModelService(pb_grpc.ModelServiceServicer):
    """Describes the one model of a server. Its calls do not count as requests of the model."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def ListModels(  # noqa: N802 - gRPC's name
        self, request: pb.ListModelsRequest, context: aio.ServicerContext
    ) -> pb.ListModelsResponse:
        del request
        async with failures_to(context, within=""):
            return pb.ListModelsResponse(models=[model_message(self._frontend)])

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: aio.ServicerContext
    ) -> pb.GetModelResponse:
        async with failures_to(context, within=""):
            self._frontend.preparer.check_model(request.name)
            return pb.GetModelResponse(model=model_message(self._frontend))


def model_message(frontend: Frontend) -> pb.Model:
    """Describes the served model. Raises RequestFailed where there was no engine yet."""
    preparer, engine = frontend.preparer, frontend.info
    form = preparer.outputs.form
    return pb.Model(
        name=preparer.name,
        architecture=preparer.architecture,
        max_model_length=engine.limits.longest,
        vocabulary_size=engine.limits.vocabulary,
        dtype=engine.dtype,
        vision=preparer.images is not None,
        chat_template=preparer.chat is not None,
        tool_format=form.tools.name if form.tools is not None else "",
        reasoning_format=form.reasoning.name if form.reasoning is not None else "",
    )
