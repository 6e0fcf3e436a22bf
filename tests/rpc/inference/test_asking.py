"""Requests of the protocol become specs, and failures have the names of its fields."""

import base64
import json

import pytest

from rpc.frontend.errors import RequestFailed
from rpc.services.inference import pb
from rpc.services.inference.asking import InferRequest, read_request, renamed
from tests.rpc.inference.messages import Elements, request

PNG = b"\x89PNG\r\n\x1a\n and so on"


def asked(**inputs: Elements) -> InferRequest:
    return read_request(request(**({"text_input": [b"cat"]} | inputs)), 128)


def refused(message: pb.ModelInferRequest) -> tuple[str, str, str]:
    with pytest.raises(RequestFailed) as failure:
        read_request(message, 128)
    return failure.value.code, failure.value.reason, failure.value.field


def test_the_prompt_comes_before_the_text_unless_it_is_excluded_or_streamed() -> None:
    assert asked().before == asked(exclude_input_in_output=False).before == "cat"
    assert asked(exclude_input_in_output=True).before == asked(stream=True).before == ""
    both = request(text_input=[b"cat"], stream=True, exclude_input_in_output=False)
    assert refused(both) == ("INVALID_ARGUMENT", "INVALID_FIELD", "exclude_input_in_output")


def test_outputs_are_those_that_are_flagged_or_else_named() -> None:
    flagged = request(
        text_input=[b"cat"], return_logprobs=True, return_finish_reason=True, return_num_input_tokens=False
    )
    flagged.parameters["prompt_logprobs"].int64_param = 2
    assert read_request(flagged, 128).outputs == ("text_output", "finish_reason", "logprobs", "prompt_logprobs")
    for name in ("num_output_tokens", "text_output"):
        flagged.outputs.add(name=name)
    assert read_request(flagged, 128).outputs == ("num_output_tokens", "text_output")


def test_parameters_of_the_tensor_come_before_those_of_the_request() -> None:
    message = request(text_input=[b"cat"])
    message.parameters["max_tokens"].int64_param = 5
    message.parameters["temperature"].string_param = "0.5"
    message.parameters["seed"].uint64_param = 2**64 - 1
    spec = read_request(message, 128).spec
    assert (spec.stopping.max_tokens, spec.sampling.temperature, spec.sampling.seed) == (5, 0.5, 2**64 - 1)
    message = request(text_input=[b"cat"], sampling_parameters=[json.dumps({"max_tokens": 7}).encode()])
    message.parameters["temperature"].double_param = 9e9
    message.parameters["whatever"].bool_param = True
    spec = read_request(message, 128).spec
    assert (spec.stopping.max_tokens, spec.sampling.temperature) == (7, 1.0)


def test_the_protocol_s_own_parameters_are_none_of_sampling() -> None:
    message = request(text_input=[b"cat"])
    message.parameters["timeout"].int64_param = 1_500_000
    message.parameters["priority"].uint64_param = 0
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    assert read_request(message, 128).spec.max_queue_time == 1.5
    message.parameters["priority"].uint64_param = 1
    assert refused(message) == ("INVALID_ARGUMENT", "NOT_SUPPORTED", "priority")
    del message.parameters["priority"]
    message.parameters["sequence_id"].string_param = "a"
    assert refused(message) == ("INVALID_ARGUMENT", "NOT_SUPPORTED", "sequence_id")


def test_images_are_files_or_their_base64() -> None:
    broken_in_lines = base64.encodebytes(PNG * 20)
    assert b"\n" in broken_in_lines.strip()
    found = asked(image=[PNG, base64.b64encode(PNG), broken_in_lines]).spec.images
    assert found == (PNG, PNG, PNG * 20)
    assert refused(request(text_input=[b"cat"], image=[PNG, b"a"]))[2] == "image[1]"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("text_input", request(image=[b""])),
        ("text_input", request(text_input=[b"\xff"])),
        ("sampling_parameters", request(text_input=[b"cat"], sampling_parameters=[b"[1]"])),
        ("sampling_parameters", request(text_input=[b"cat"], sampling_parameters=[b"{" * 10_000])),
        ("parameters", pb.ModelInferRequest(parameters={str(i): pb.InferParameter() for i in range(300)})),
        ("id", pb.ModelInferRequest(id="i" * 129)),
    ],
)
def test_what_is_refused_before_the_frontend_sees_it(field: str, message: pb.ModelInferRequest) -> None:
    if field == "parameters":
        message.MergeFrom(request(text_input=[b"cat"]))
    assert refused(message) == ("INVALID_ARGUMENT", "INVALID_FIELD", field)


def test_a_model_has_one_version() -> None:
    message = request(text_input=[b"cat"])
    message.model_version = "1"
    read_request(message, 128)
    message.model_version = "2"
    assert refused(message)[:2] == ("NOT_FOUND", "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("text", "text_input"),
        ("images[2]", "image[2]"),
        ("sampling.sequence_count", "n"),
        ("sampling.logit_bias[5]", "logit_bias[5]"),
        ("stopping.stop[1]", "stop[1]"),
        ("stopping.include_stop", "include_stop_str_in_output"),
        ("output.top_logprobs", "logprobs"),
        ("max_queue_time", "timeout"),
        ("top_k", "top_k"),
    ],
)
def test_failures_have_the_names_that_the_client_knows(ours: str, theirs: str) -> None:
    failure = renamed(RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", f"{ours} is 7: no", ours, 2.0))
    assert (failure.field, failure.message, failure.retry_after) == (theirs, f"{theirs} is 7: no", 2.0)
    missing = RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", "model 'text' is not served here", "text")
    assert renamed(missing) is missing
