"""Unchanged clients of the Open Inference Protocol, each in a process of its own, get what the native API gives."""

import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from quire.v1 import generation_service_pb2 as native

from rpc.services.inference import pb
from rpc.services.inference.tensors import INPUTS, OUTPUTS
from tests.e2e.test_images import asked
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded
from tests.model.vision.seen import NEW, PROMPTS, Seen
from tests.rpc.inference.messages import request
from tests.rpc.inference.test_parameters import ALL
from tests.support.inference_clients.triton_sync import prompt
from tests.support.server import RunningServer, clean_environment, details, running_server, stream_request

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "support" / "inference_clients"
KSERVE = ROOT / "build" / "kserve" / "bin" / "python"
needs_kserve = pytest.mark.skipif(not KSERVE.exists(), reason="kserve is not in build/kserve, where .ci/run puts it")
SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--max-message-bytes", "4MiB", "--reflection") as running:
        yield running


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def told(server: RunningServer, client: str, python: Path | str = sys.executable) -> dict[str, object]:
    """Runs the client of this name, and returns what it has seen."""
    command = [str(python), str(CLIENTS / f"{client}.py"), server.address, server.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def texts(server: RunningServer, channel: grpc.Channel, text: str, seed: int = 7, count: int = 1) -> list[str]:
    """Texts of the native API, with the clients' other parameters and vLLM's defaults: the model has others."""
    sampling = {"temperature": 0.75, "seed": seed, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    spec = stream_request(text, 12, **sampling, sequence_count=count).spec
    return [s.text for s in server.stub(channel).Generate(native.GenerateRequest(spec=spec)).sequences]


def statistics(channel: grpc.Channel) -> pb.InferStatistics:
    call = channel.unary_unary(SERVICE + "ModelStatistics", response_deserializer=pb.ModelStatisticsResponse.FromString)
    return call(b"").model_stats[0].inference_stats  # type: ignore[no-any-return]


def by_sequence(answers: list[dict[str, list[object]]], output: str) -> list[list[object]]:
    """Returns the results by sequence."""
    return [list(parts) for parts in zip(*(answer[output] for answer in answers), strict=True)]


def test_tritonclient(server: RunningServer, channel: grpc.Channel) -> None:
    before, counts = server.metrics()["quire_requests_total{cancelled}"], statistics(channel)
    seen = told(server, "triton_sync")
    (one,), two = texts(server, channel, "ROMEO:"), texts(server, channel, "KING:", count=2)
    assert seen["live"] == [True, True]
    assert seen["ready"] == [True, True, False]
    assert seen["metadata"]["name"] == "quire"
    for found, tensors in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        names = [tensor.name for tensor in tensors if tensor.name != "image"]
        assert [tensor["name"] for tensor in seen["model"][found]] == names
        assert [tensor["name"] for tensor in seen["config"][found[:-1]]] == names
    assert [tensor.get("optional", False) for tensor in seen["config"]["input"]] == [False] + [True] * 8
    assert seen["config"]["model_transaction_policy"] == {"decoupled": True}
    assert seen["two"] == {"text_output": two}
    assert seen["named"] == {"num_output_tokens": [12]}
    whole = seen["whole"]
    assert whole["text_output"] == ["ROMEO:" + one]
    assert (whole["finish_reason"], whole["num_input_tokens"], whole["num_output_tokens"]) == (["length"], [2], [12])
    positions = json.loads(whole["logprobs"][0])
    assert "".join(next(iter(position.values()))["decoded_token"] for position in positions) == one
    assert all({1, 2} <= {token["rank"] for token in position.values()} for position in positions)
    total = sum(next(iter(position.values()))["logprob"] for position in positions)
    assert whole["cumulative_logprob"] == [pytest.approx(total, abs=1e-4)]
    streams = seen["streams"]
    for answers, expected in ((streams["one"], [one]), (streams["two"], two)):
        assert len(answers) > 3
        assert ["".join(parts) for parts in by_sequence(answers, "text_output")] == expected
        assert [sum(parts) for parts in by_sequence(answers, "num_output_tokens")] == [12] * len(expected)
        running = ["None"] * (len(answers) - 1)
        assert by_sequence(answers, "finish_reason") == [[*running, "length"]] * len(expected)
    greedy = server.stub(channel).Generate(native.GenerateRequest(spec=stream_request("ROMEO:", 4, temperature=0).spec))
    assert streams["three"] == [{"text_output": ["ROMEO:" + greedy.sequences[0].text]}]
    assert streams[""] == ["top_k is -2: must be in [0, 2^32), 0 is off"]
    assert sorted(streams["final"]) == ["one", "three", "two"]
    assert seen["cancelled"] == "StatusCode.CANCELLED"
    server.wait_for_metric("quire_num_requests_running", 0)
    server.wait_for_metric("quire_requests_total{cancelled}", before + 3)
    assert [status for status, _ in seen["refused"]] == [
        "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT",
        "StatusCode.UNIMPLEMENTED", "StatusCode.UNIMPLEMENTED",
    ]  # fmt: skip
    assert [message.split()[0] for _, message in seen["refused"]] == [
        "temperature", "model", "text_input", "RepositoryIndex", "SystemSharedMemoryStatus",
    ]  # fmt: skip
    (last,) = seen["statistics"]
    success, fail = last["inference_stats"]["success"], last["inference_stats"]["fail"]
    assert int(last["inference_count"]) == int(success["count"]) == counts.success.count + 6
    assert int(fail["count"]) == counts.fail.count + 7
    assert int(success["ns"]) > counts.success.ns + 10**6
    assert int(last["last_inference"]) > 10**12
    status, message = seen["structured"]
    assert (status, message.split()[0]) == ("StatusCode.INVALID_ARGUMENT", "structured_outputs.regex")


def test_tritonclient_aio(server: RunningServer, channel: grpc.Channel) -> None:
    before = server.metrics()["quire_requests_total{cancelled}"]
    seen = told(server, "triton_aio")
    expected = {str(seed): texts(server, channel, "ROMEO:", seed)[0] for seed in range(6)}
    assert len(set(expected.values())) == 6
    assert seen["streams"] == expected
    assert seen["whole"] == texts(server, channel, "ROMEO:")[0]
    assert seen["live"] == [True, True, True]
    assert seen["cancelled"] is True
    assert seen["refused"] == ["StatusCode.INVALID_ARGUMENT", "min_p is 2.0: must be in [0, 1]"]
    server.wait_for_metric("quire_num_requests_running", 0)
    server.wait_for_metric("quire_requests_total{cancelled}", before + 3)


@needs_kserve
def test_kserve(server: RunningServer, channel: grpc.Channel) -> None:
    seen = told(server, "kserve_sdk", KSERVE)
    (one,) = texts(server, channel, "ROMEO:")
    assert seen["raw"] == seen["typed"] == ["mine", "ROMEO:" + one, [12]]
    assert seen["refused"] == ["INVALID_ARGUMENT", "top_p is 0.0: must be in (0, 1]"]
    assert seen["live"] == [True, True]
    assert seen["ready"] == [True, False]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("python", "theirs"),
    [
        pytest.param(sys.executable, "from tritonclient.grpc import service_pb2 as theirs", id="tritonclient"),
        pytest.param(
            str(KSERVE),
            "from kserve.protocol.grpc import grpc_predict_v2_pb2 as theirs",
            id="kserve",
            marks=needs_kserve,
        ),
    ],
)
def test_clients_can_be_imported_beside_the_service(python: str, theirs: str, order: int) -> None:
    lines = [theirs, "from rpc.services.inference import pb"][::order]
    lines.append("made = pb.ModelInferRequest(id='a', parameters={'n': pb.InferParameter(int64_param=3)})")
    lines.append("print(theirs.ModelInferRequest.FromString(made.SerializeToString()).parameters['n'].int64_param)")
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment)
    assert done.stdout == "3\n", done.stderr


def test_failures_carry_the_details_of_the_native_api(server: RunningServer, channel: grpc.Channel) -> None:
    call = channel.unary_unary(
        SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )
    message = request(text_input=[b"ROMEO:"], sampling_parameters=[b'{"n": 9}'])
    with pytest.raises(grpc.RpcError) as refused:
        call(message)
    found = details(refused.value)
    assert found["ErrorInfo"] == error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="quire")
    assert [violation.field for violation in found["BadRequest"].field_violations] == ["n"]
    message = request(text_input=[b"ROMEO:"])
    message.model_name = "nobody"
    with pytest.raises(grpc.RpcError) as unknown:
        call(message)
    assert details(unknown.value)["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    with pytest.raises(grpc.RpcError) as absent:
        channel.unary_unary(SERVICE + "LogSettings")(b"")
    assert absent.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert details(absent.value)["ErrorInfo"].reason == "NOT_SUPPORTED"


def test_hostile_messages_harm_nobody(server: RunningServer, channel: grpc.Channel) -> None:
    """Each on a stream of its own and on one with all of them, while another client is served."""
    shapes, length, deep = request(text_input=[b"x"]), request(text_input=[b"x"]), b"[" * 2**18
    shapes.inputs[0].shape[:] = [2**31, 2**62]
    length.raw_input_contents[0] = b"\xff\xff\xff\xffx"
    messages = [
        shapes,
        length,
        request(text_input=[b"x"], sampling_parameters=[deep]),
        request(text_input=[b"x"], sampling_parameters=[b'{"stop":' + deep[:900] + b"]" * 900 + b"}"]),
        request(text_input=[b"x"], sampling_parameters=[b'{"temperature": ' + b"9" * 4000 + b"}"]),
        request(text_input=[b"x"], sampling_parameters=[b'{"max_tokens": ' + b"9" * 4000 + b"}"]),
        request(text_input=[b"x"], sampling_parameters=[b'{"top_p": "nan"}']),
        request(text_input=[b"x"], sampling_parameters=[b'{"logit_bias": {"' + b"9" * 4000 + b'": 1}}']),
        request(text_input=[b"\xff" * 2**20]),
        request(text_input=[b"x" * 2**21]),
        request(image=[b""] * 4096),
        pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor(name="text_input")] * 100_000),
        pb.ModelInferRequest(raw_input_contents=[b""] * 500_000),
    ]
    call = channel.stream_stream(
        SERVICE + "ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    (expected,), served = texts(server, channel, "ROMEO:"), list[str]()

    def serve() -> None:
        served.extend(texts(server, channel, "ROMEO:")[0] for _ in range(20))

    other = threading.Thread(target=serve)
    other.start()
    for sent in (*([message] for message in messages), messages):
        answers = list(call(iter(sent), timeout=60))
        assert len(answers) == len(sent)
        for answer in answers:
            assert answer.error_message
            assert len(answer.error_message) < 500
            assert answer.infer_response.parameters["quire_error_code"].string_param == "INVALID_ARGUMENT"
    other.join()
    assert served == [expected] * 20
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(SERVICE + "ModelInfer")(b"\xff\xff\xff", timeout=60)
    assert texts(server, channel, "ROMEO:") == [expected]


def test_reflection_and_health_know_it_beside_the_native_services(channel: grpc.Channel) -> None:
    reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    names = ("inference.GRPCInferenceService", "quire.v1.GenerationService", "inference.Nothing")
    asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in names]
    asked.append(reflection_pb2.ServerReflectionRequest(list_services=""))
    *files, nothing, services = reflected(iter(asked))
    for name, answer in zip(names[:2], files, strict=True):
        found = [FileDescriptorProto.FromString(one) for one in answer.file_descriptor_response.file_descriptor_proto]
        assert name in [f"{file.package}.{service.name}" for file in found for service in file.service]
        assert name in [service.name for service in services.list_services_response.service]
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_images_are_base64_or_files(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    directory = shelf.checkpoint(BY_NAME["smolvlm"])
    seen = Seen(BY_NAME["smolvlm"], shelf)
    text, which = PROMPTS[1]
    files = [encoded(seen.images[i]) for i in which]
    with (
        running_server("--model", str(directory), "--kv-cache-memory", "16MiB") as server,
        grpc.insecure_channel(server.address) as channel,
        triton.InferenceServerClient(server.address) as client,
    ):
        native_text = server.stub(channel).Generate(native.GenerateRequest(spec=asked(text, *files))).sequences[0].text
        assert "image" in [tensor.name for tensor in client.get_model_metadata(server.model).inputs]
        for images in (files, [base64.b64encode(file) for file in files]):
            tensor = triton.InferInput("image", [len(images)], "BYTES")
            tensor.set_data_from_numpy(np.array(images, object))
            sampling = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
            answer = client.infer(server.model, [*prompt(text, sampling, exclude_input_in_output=True), tensor])
            assert answer.as_numpy("text_output").tolist() == [native_text.encode()]
        tensor.set_shape([1]).set_data_from_numpy(np.array([base64.b64encode(b"cat")], object))
        with pytest.raises(triton.InferenceServerException, match=r"image\[0\] is '3 bytes': is no image"):
            client.infer(server.model, [*prompt(text), tensor])
    seen.preparer.close()


def test_the_example_of_its_page_runs(server: RunningServer) -> None:
    page = (ROOT / "docs" / "guides" / "open-inference.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = example.replace("127.0.0.1:50051", server.address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout  # the length is the model's: it draws, and may end an answer early
    for name in (*(tensor.name for tensor in (*INPUTS, *OUTPUTS)), *ALL):
        assert f"`{name}`" in page
