"""TokenizationService on a real server of the demo model."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as generation_pb
from quire.v1 import tokenization_service_pb2 as pb
from quire.v1 import tokenization_service_pb2_grpc as pb_grpc

from tests.support.server import RunningServer, details, running_server, stream_request


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--kv-cache-memory", str(128 * 16 * 3072)) as running:
        yield running


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> pb_grpc.TokenizationServiceStub:
    return pb_grpc.TokenizationServiceStub(channel)


def test_round_trip(stub: pb_grpc.TokenizationServiceStub) -> None:
    for text in ("ROMEO:\nWhat light", "ünï — 日本語 👩‍👩‍👧", "", "<|endoftext|>"):
        ids = stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)).text == text
    assert list(ids) == [0]
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == ""
    assert stub.Tokenize(pb.TokenizeRequest(text="A", model="quire-demo", add_special_tokens=False)).token_ids


def test_ids_are_those_of_a_prompt(
    server: RunningServer, channel: grpc.Channel, stub: pb_grpc.TokenizationServiceStub
) -> None:
    ids = stub.Tokenize(pb.TokenizeRequest(text="ROMEO:")).token_ids
    answers = [
        server.stub(channel).Generate(generation_pb.GenerateRequest(spec=stream_request(prompt, 8, temperature=0).spec))
        for prompt in ("ROMEO:", list(ids))
    ]
    assert answers[0].sequences[0].token_ids == answers[1].sequences[0].token_ids
    assert answers[0].usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.TokenizeRequest(text="w" * 70_000), "text"),
        (pb.DetokenizeRequest(token_ids=[1, 2, 2048]), "token_ids[2]"),
        (pb.DetokenizeRequest(token_ids=[1] * 1025), "token_ids"),
    ],
)
def test_bad_values_name_their_field(
    stub: pb_grpc.TokenizationServiceStub, request_: pb.TokenizeRequest | pb.DetokenizeRequest, field: str
) -> None:
    call = stub.Tokenize if isinstance(request_, pb.TokenizeRequest) else stub.Detokenize
    with pytest.raises(grpc.RpcError) as refused:
        call(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(refused.value)
    assert found["ErrorInfo"].reason == "INVALID_FIELD"
    assert [v.field for v in found["BadRequest"].field_violations] == [field]
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])).text


def test_unknown_model_is_not_found(stub: pb_grpc.TokenizationServiceStub) -> None:
    for call in (
        lambda: stub.Tokenize(pb.TokenizeRequest(model="gpt-5", text="A")),
        lambda: stub.Detokenize(pb.DetokenizeRequest(model="gpt-5", token_ids=[1])),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert details(refused.value)["ErrorInfo"].reason == "MODEL_NOT_FOUND"


def test_health_knows_the_service_and_metrics_count_no_request(
    server: RunningServer, channel: grpc.Channel, stub: pb_grpc.TokenizationServiceStub
) -> None:
    before = server.metrics()
    stub.Tokenize(pb.TokenizeRequest(text="A"))
    after = server.metrics()
    counted = {k for k in after if k.startswith("quire_requests_total") and after[k] != before.get(k)}
    assert counted == set()
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(service="quire.v1.TokenizationService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
