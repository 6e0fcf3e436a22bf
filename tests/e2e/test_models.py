"""ModelService on real servers, and `quire models`."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import model_service_pb2 as pb
from quire.v1 import model_service_pb2_grpc as pb_grpc

from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.support.server import details, quire, running_server


def test_what_is_served() -> None:
    # 32 pages of 16 tokens: fewer than the model's context of 1,024.
    flags = ("--kv-cache-memory", str(32 * 16 * 3072), "--dtype", "bfloat16", "--served-model-name", "bard")
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.ModelServiceStub(channel)
        (model,) = stub.ListModels(pb.ListModelsRequest()).models
        assert model == pb.Model(
            name="bard",
            architecture="LlamaForCausalLM",
            max_model_length=513,
            vocabulary_size=2048,
            dtype="bfloat16",
            chat_template=False,
        )
        assert stub.GetModel(pb.GetModelRequest(name="bard")).model == model
        with pytest.raises(grpc.RpcError) as unknown:
            stub.GetModel(pb.GetModelRequest(name="gpt-5"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert details(unknown.value)["ErrorInfo"].reason == "MODEL_NOT_FOUND"
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="quire.v1.ModelService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert quire("models", "--server", server.address).stdout == "bard\n"
    gone = quire("models", "--server", server.address)
    assert gone.returncode == 1
    assert "no server answers" in gone.stderr


def test_a_model_that_sees_says_so(tmp_path: Path) -> None:
    directory = Shelf(tmp_path).checkpoint(BY_NAME["smolvlm"])
    with (
        running_server("--model", str(directory), "--kv-cache-memory", "16MiB") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        (model,) = pb_grpc.ModelServiceStub(channel).ListModels(pb.ListModelsRequest()).models
        assert model.vision
        assert model.architecture == "SmolVLMForConditionalGeneration"
