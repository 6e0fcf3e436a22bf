"""Lines of OpenAI's Batch API: what is a request, how it is answered, and how a failure reads."""

import asyncio
import json
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import tokenization_service_pb2 as tokenization_pb

from rpc.batch.line import Line, Outcome
from rpc.batch.openai_lines import OpenAILine, parse_openai_line
from rpc.frontend.errors import RequestFailed, internal
from rpc.gateway.served import ServedModels

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
USAGE = pb.Usage(prompt_tokens=4, cached_prompt_tokens=1, completion_tokens=2)
URLS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


class FakeServer:
    """Answers each request with its prompt, and what is asked of a tokenizer of single characters."""

    def __init__(self) -> None:
        self.served = ServedModels(self)
        self.failures: dict[str, BaseException] = {}
        self.running = self.most = 0

    async def ask(self, stub: type, method: str, request: Any, metadata: Any) -> Any:
        match method:
            case "ListModels":
                return model_pb.ListModelsResponse(models=[model_pb.Model(name="m")])
            case "Tokenize":
                return tokenization_pb.TokenizeResponse(token_ids=map(ord, request.text))
            case _:
                return tokenization_pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        spec = request.spec
        text = spec.text or "".join(map(chr, spec.token_ids.ids)) or spec.chat.messages[0].parts[0].text
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if text in self.failures:
            raise self.failures[text]
        logprobs = [pb.TokenLogprobs(tokens=[pb.TokenLogprob(token_id=ord(sign), logprob=-0.5)]) for sign in text]
        sequences = [
            pb.SequenceResult(
                index=i,
                text=text,
                logprobs=logprobs if spec.output.logprobs else [],
                finish_reason=pb.FINISH_REASON_STOP,
                stop_string=".",
            )
            for i in range(max(1, spec.sampling.sequence_count))
        ]
        ids = [ord(sign) for sign in text] if spec.output.prompt_token_ids else []
        prompt = pb.PromptInfo(logprobs=[pb.TokenLogprobs(), *logprobs[1:]], token_ids=ids)
        return pb.GenerateResponse(request_id="r-1", sequences=sequences, usage=USAGE, prompt_info=prompt)


def parse(values: object) -> Line:
    return parse_openai_line(4, 7, values if isinstance(values, bytes) else json.dumps(values).encode())


def line(kind: str = "text", **body: Any) -> Line:
    whole = (CHAT if kind == "chat" else {"model": "m", "prompt": "Hi"}) | body
    return parse({"custom_id": "a", "method": "POST", "url": URLS[kind], "body": whole})


def ended(asked: Line, server: FakeServer | None = None) -> tuple[Outcome, dict[str, Any]]:
    """Returns the outcome of a line, and its output."""

    async def run() -> Outcome:
        return await asked.run(server or FakeServer())

    outcome = asyncio.run(run())
    values = json.loads(outcome.text)
    assert values.keys() == {"id", "custom_id", "response", "error"}
    assert values["id"].startswith("batch_req_")
    return outcome, values


def body_of(asked: Line, server: FakeServer | None = None) -> dict[str, Any]:
    """The answer of a line that does not fail."""
    outcome, values = ended(asked, server)
    assert not outcome.failed
    assert (values["custom_id"], values["error"]) == ("a", None)
    response: dict[str, Any] = values["response"]
    assert (response["status_code"], response["request_id"]) == (200, "r-1")
    usage = response["body"]["usage"]
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    body: dict[str, Any] = response["body"]
    return body


def refusal_of(asked: Line, server: FakeServer | None = None) -> tuple[int, dict[str, Any]]:
    """Status and error of a line whose request is refused."""
    outcome, values = ended(asked, server)
    assert outcome.failed
    assert (values["custom_id"], values["error"]) == ("a", None)
    assert values["response"]["body"].keys() == {"error"}
    return values["response"]["status_code"], values["response"]["body"]["error"]


def test_a_conversation_gets_the_answer_of_its_endpoint() -> None:
    body = body_of(line("chat", n=2, logprobs=True, top_logprobs=1))
    answer = OpenAIChat.model_validate(body)
    assert [choice.message.content for choice in answer.choices] == ["Hi", "Hi"]
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("chat.completion", "m", "stop")
    assert answer.choices[1].logprobs is not None
    assert [entry.token for entry in answer.choices[1].logprobs.content or ()] == ["H", "i"]
    assert body["choices"][0]["stop_reason"] == "."


def test_a_text_gets_the_answer_of_its_endpoint_with_its_echo() -> None:
    answer = OpenAICompletion.model_validate(body_of(line("text")))
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Hi")
    (choice,) = body_of(line("text", echo=True, logprobs=0))["choices"]
    assert choice["text"] == "HiHi"
    assert choice["logprobs"]["tokens"] == ["H", "i", "H", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]


def test_several_prompts_run_at_once_and_stand_in_order() -> None:
    server = FakeServer()
    body = body_of(line("text", prompt=["A", "B", [67]], n=2), server)
    assert [choice["text"] for choice in body["choices"]] == ["A", "A", "B", "B", "C", "C"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["total_tokens"] == 3 * 6
    assert server.most == 3


def test_a_prompt_that_fails_is_named() -> None:
    server = FakeServer()
    server.failures["B"] = RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "text is 'B': bad", field="text")
    status, error = refusal_of(line("text", prompt=["A", "B"]), server)
    assert (status, error["param"]) == (400, "prompt[1]")
    assert error["message"] == "prompt[1] is 'B': bad"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", "no such model", field="m"), 404, "model_not_found"),
        (RequestFailed("RESOURCE_EXHAUSTED", "CALL_FAILED", "message larger than max (9 vs. 4)"), 413, None),
        (internal(), 500, "internal"),
    ],
)
def test_failures_are_those_of_the_gateway(failure: RequestFailed, status: int, code: str | None) -> None:
    server = FakeServer()
    server.failures["Hi"] = failure
    found, error = refusal_of(line("chat"), server)
    assert found == status
    if code is not None:
        assert error["code"] == code
    assert json.loads(line("chat").failed(failure))["response"]["status_code"] == status


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"colour": 1}, "colour", "unknown_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
    ],
)
def test_bodies_are_checked_as_the_gateway_does(body: dict[str, Any], param: str, code: str | None) -> None:
    asked = line("chat", **body)
    assert isinstance(asked, OpenAILine)
    status, error = refusal_of(asked)
    assert (status, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (b"{", 7, "line 7: is no JSON: "),
        (b"[" * 1000, 7, "line 7: is no JSON: "),
        ({"custom_id": "\ud800"}, 7, "line 7: is no JSON: "),
        (b'{"custom_id": NaN}', 7, "line 7: is no JSON: "),
        ([1], 7, "line 7: is no JSON object"),
        ({"id": "a", "prompt": "A"}, 7, "line 7: has none of custom_id, method, url, body: the file is in OpenAI's"),
        ({"method": "POST"}, 7, "line 7: custom_id is None, must be a string"),
        ({"custom_id": "a", "id": 3}, "a", "line 7: 'id' is not known here; a line has custom_id, method, url, body"),
        ({"custom_id": "a"}, "a", "line 7: method is None, must be 'POST'"),
        ({"custom_id": "a", "method": "GET"}, "a", "line 7: method is 'GET', must be 'POST'"),
        (
            {"custom_id": "a", "method": "POST", "url": "/v1/embeddings"},
            "a",
            "line 7: url is '/v1/embeddings', must be /v1/completions or /v1/chat/completions",
        ),
        ({"custom_id": "a", "method": "POST", "url": ["u"]}, "a", "line 7: url is ['u'], must be"),
        ({"custom_id": "a", "method": "POST", "url": URLS["text"]}, "a", "line 7: body is None, must be an object"),
    ],
)
def test_what_is_no_request_says_why_by_line(values: object, name: object, message: str) -> None:
    asked = parse(values)
    outcome, found = ended(asked)
    assert (asked.index, asked.id, outcome.failed) == (4, name, True)
    assert (found["custom_id"], found["response"]) == (name, None)
    assert found["error"].keys() == {"code", "message"}
    assert found["error"]["message"].startswith(message)
