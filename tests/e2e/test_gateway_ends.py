"""Requests that end before their time, and abilities that a model lacks, as clients of the gateway see them."""

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_pb_grpc

from tests.support.gateway import RunningGateway, running_gateway
from tests.support.server import RunningServer, running_server

LONG: dict[str, Any] = {
    "model": "quire-demo", "prompt": "ROMEO:", "max_tokens": 900, "extra_body": {"ignore_eos": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--kv-cache-memory", str(1024 * 16 * 3072)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([server.address]) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_out_of_time(server: RunningServer, stream: bool) -> None:
    with running_gateway([server.address], "--max-request-time", "0.2") as gateway, gateway.client() as client:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        extras = LONG["extra_body"] | {"return_token_ids": True}
        answer = client.completions.create(n=8, stream=stream, **options, **LONG | {"extra_body": extras})
        parts = list(answer) if stream else [answer]
        choices = [choice for part in parts for choice in part.choices]
        ended = [(c.finish_reason, c.stop_reason) for c in choices if c.finish_reason]
        assert ended == [("length", "deadline")] * 8
        tokens = sum(len(choice.token_ids) for choice in choices)
        assert parts[-1].usage.completion_tokens == tokens, "what came is what is counted"
        assert tokens < 8 * 900


def test_ended_by_an_operator(server: RunningServer, gateway: RunningGateway) -> None:
    with grpc.insecure_channel(server.admin) as admin, gateway.client() as client:
        operator = admin_pb_grpc.AdminServiceStub(admin)
        stream = client.completions.create(stream=True, **LONG)
        next(stream)
        (live,) = operator.ListRequests(admin_pb.ListRequestsRequest(), timeout=30).requests
        operator.CancelRequest(admin_pb.CancelRequestRequest(request_id=live.request_id), timeout=30)
        *_, last = stream
        assert (last.choices[0].finish_reason, last.choices[0].stop_reason) == ("length", "abort")


def test_too_long_and_no_template(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        prompts = ("a " * 2000, "a " * 35_000, "a " * 50_000, [1] * 80_000)  # a message has at most 73,728 bytes
        for more in (*({"prompt": prompt} for prompt in prompts), {"max_tokens": 10**6}):
            with pytest.raises(openai.BadRequestError) as long:
                client.completions.create(**LONG | more)
            assert (long.value.code, long.value.param) == ("context_length_exceeded", next(iter(more)))
            assert "This model's maximum context length is 1024 tokens. However, you" in long.value.message
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as long:
            client.chat.completions.create(model="quire-demo", messages=[{"role": "user", "content": "a " * 50_000}])
        assert "This model's maximum context length is 1024 tokens. However, you" in long.value.message
        with pytest.raises(openai.BadRequestError, match="use /v1/completions") as raw:
            client.chat.completions.create(model="quire-demo", messages=[{"role": "user", "content": "A"}])
        assert raw.value.param == "messages"
