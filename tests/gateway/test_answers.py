"""Answers made of servers' messages: events, whole answers, logprobs in both forms."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.pacing import Work
from rpc.gateway.answers import ApiResponse, Piece
from rpc.gateway.chat import ChatResponse
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.completions import CompletionResponse
from rpc.gateway.errors import ApiError
from rpc.gateway.logprobs import LEAST, TURN, answer_as_json, likeliest
from rpc.gateway.responses import ModelResponse, ResponseEvents
from rpc.gateway.responses_schema import read_responses
from rpc.gateway.sse import DONE, Events

WORDS = {1: "one", 2: " two", 3: "\ufffd", 4: '"\\\n\u2028é', 5: "one"}
CHAT = {"messages": [{"role": "user", "content": "A"}], "model": "m"}


class Words:
    """In the place of what servers say."""

    async def model(self, name: str | None, metadata: object) -> tuple[str, str]:
        return name or "m", "fp_1"

    async def texts(self, ids: Iterable[int], *rest: object) -> dict[int, str]:
        return {token: WORDS[token] for token in ids}

    async def detokenize(self, ids: list[int], *rest: object) -> str:
        return "".join(WORDS[token] for token in ids)


def answer(kind: type[ApiResponse], schema: Any, **asked: Any) -> ApiResponse:
    made = kind(schema.model_validate(asked), Words(), ())  # type: ignore[arg-type]
    asyncio.run(made.begin())
    return made


def chat(**asked: Any) -> ApiResponse:
    return answer(ChatResponse, ChatRequest, **CHAT, **asked)


def completion(**asked: Any) -> ApiResponse:
    return answer(CompletionResponse, CompletionRequest, **{"prompt": "A"} | asked)


def taken(made: ApiResponse, *messages: tuple[int, pb.StreamGenerateResponse]) -> list[Piece]:
    async def take() -> list[Piece]:
        return [piece for position, message in messages for piece in await made.pieces_of(position, message)]

    return asyncio.run(take())


def message(*deltas: pb.SequenceDelta, prompt: int = 0, out: int = 0) -> pb.StreamGenerateResponse:
    made = pb.StreamGenerateResponse(deltas=deltas)
    if prompt:
        made.usage.CopyFrom(pb.Usage(prompt_tokens=prompt, cached_prompt_tokens=1, completion_tokens=out))
    return made


def position(*tokens: tuple[int, float]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(tokens=[pb.TokenLogprob(token_id=t, logprob=p) for t, p in tokens])


END = pb.FINISH_REASON_LENGTH


def parsed(events: bytes) -> list[dict[str, Any]]:
    assert events.endswith(b"\n\n") or not events
    return [json.loads(event.removeprefix("data: ")) for event in events.decode().split("\n\n") if event]


def test_chunks_are_what_openai_makes_of_them() -> None:
    made = chat(stream=True, n=2, stream_options={"include_usage": True})
    events = Events(made)
    pieces = taken(
        made,
        (0, message(pb.SequenceDelta(text=WORDS[4]), pb.SequenceDelta(index=1, text="b"))),
        (0, message(pb.SequenceDelta(token_count=1))),
        (0, message(pb.SequenceDelta(text="c", finish_reason=END), prompt=7, out=3)),
    )
    chunks = [
        ChatCompletionChunk.model_validate(e, strict=True)
        for e in parsed(events.encode(pieces) + events.end().removesuffix(DONE))
    ]
    shown = [(c.choices[0].index, c.choices[0].delta.role, c.choices[0].delta.content) for c in chunks[:-1]]
    assert shown == [
        (0, "assistant", ""), (0, None, WORDS[4]), (1, "assistant", ""), (1, None, "b"), (0, None, "c"),
    ]  # fmt: skip
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (7, 3)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1
    assert {(c.id, c.model, c.system_fingerprint, c.object) for c in chunks} == {
        (chunks[0].id, "m", "fp_1", "chat.completion.chunk")
    }


def test_choices_of_several_prompts() -> None:
    made = completion(prompt=["A", "B"], n=2, model="m")
    pieces = taken(
        made,
        (1, message(pb.SequenceDelta(index=1, text="d", finish_reason=END), pb.SequenceDelta(index=0, text="c"))),
        (0, message(pb.SequenceDelta(text="a"), pb.SequenceDelta(index=1, text="b", finish_reason=END))),
        (0, message(pb.SequenceDelta(text="a", finish_reason=pb.FINISH_REASON_STOP, stop_string="x"), prompt=2, out=5)),
        (1, message(pb.SequenceDelta(text="c", finish_reason=pb.FINISH_REASON_DEADLINE), prompt=3, out=4)),
    )
    whole = made.whole(pieces)
    OpenAICompletion.model_validate(whole, strict=True)
    shown = [(c["index"], c["text"], c["finish_reason"], c["stop_reason"]) for c in whole["choices"]]
    assert shown == [
        (0, "aa", "stop", "x"),
        (1, "b", "length", None),
        (2, "cc", "length", "deadline"),
        (3, "d", "length", None),
    ]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["total_tokens"]) == (5, 14)


@pytest.mark.parametrize(
    ("reason", "told"), [(pb.FINISH_REASON_DEADLINE, "deadline"), (pb.FINISH_REASON_ABORTED, "abort")]
)
def test_what_is_cut_short_says_so_in_a_reason_that_openai_has(reason: pb.FinishReason, told: str) -> None:
    (piece,) = taken(chat(), (0, message(pb.SequenceDelta(text="a", finish_reason=reason))))
    assert (piece.finish, piece.stop) == ("length", told)


def test_what_its_constraint_has_closed_in_time_is_whole() -> None:
    call = pb.ToolCallDelta(index=0, id="c", name="now", arguments="{}")
    (text,) = taken(chat(), (0, message(pb.SequenceDelta(text="{}", finish_reason=pb.FINISH_REASON_CLOSED))))
    (calls,) = taken(chat(), (0, message(pb.SequenceDelta(tool_calls=[call], finish_reason=pb.FINISH_REASON_CLOSED))))
    assert [(piece.finish, piece.stop) for piece in (text, calls)] == [("stop", None), ("tool_calls", None)]


def test_a_stop_token_is_told_where_it_was_asked_for() -> None:
    made = chat(stop_token_ids=[4])
    for token, told in ((4, 4), (0, None)):
        delta = pb.SequenceDelta(finish_reason=pb.FINISH_REASON_STOP, stop_token_id=token)
        assert taken(made, (0, message(delta)))[0].stop == told


def test_logprobs_of_chats() -> None:
    made = chat(logprobs=True, top_logprobs=2)
    positions = [position((1, -1.5), (2, -0.25)), position((3, -float("inf")), (1, -0.5), (2, -1))]
    pieces = taken(made, (0, message(pb.SequenceDelta(text="x", finish_reason=END, logprobs=positions))))
    whole = made.whole(pieces)
    first, second = OpenAIChat.model_validate(whole, strict=True).choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("one", -1.5, [111, 110, 101])
    assert [(t.token, t.logprob) for t in first.top_logprobs] == [(" two", -0.25), ("one", -1.5)]
    assert (second.token, second.logprob, second.bytes) == ("\ufffd", LEAST, None)
    assert [t.token for t in second.top_logprobs] == ["one", " two"]
    assert whole["choices"][0]["message"]["content"] == "x"
    json.dumps(whole, allow_nan=False)


def test_logprobs_of_completions_count_characters() -> None:
    made = completion(logprobs=1, stream=True)
    pieces = taken(
        made,
        (0, message(pb.SequenceDelta(text="one two", logprobs=[position((1, -1)), position((2, -2), (1, -1))]))),
        (0, message(pb.SequenceDelta(text="one", finish_reason=END, logprobs=[position((5, -3), (1, -2.5))]))),
    )
    whole = OpenAICompletion.model_validate(made.whole(pieces), strict=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs.tokens == ["one", " two", "one"]
    assert logprobs.token_logprobs == [-1, -2, -3]
    assert logprobs.text_offset == [0, 3, 7]
    assert logprobs.top_logprobs == [{"one": -1}, {"one": -1, " two": -2}, {"one": -2.5}]
    (first, second) = parsed(Events(made).encode(pieces))
    assert first["choices"][0]["logprobs"]["text_offset"] == [0, 3]
    assert second["choices"][0]["logprobs"]["text_offset"] == [7]


def test_an_echo_comes_first_and_once() -> None:
    made = completion(echo=True, logprobs=1, n=2)
    begun = message(pb.SequenceDelta(text="c"), pb.SequenceDelta(index=1, text="d"))
    begun.prompt_info.logprobs.extend([pb.TokenLogprobs(), position((1, -1), (2, -0.5))])
    begun.prompt_info.token_ids.extend([2, 1])
    ends = [pb.SequenceDelta(index=i, finish_reason=END) for i in range(2)]
    choices = made.whole(taken(made, (0, begun), (0, begun), (0, message(*ends))))["choices"]
    assert [choice["text"] for choice in choices] == ["Acc", "Add"]
    logprobs = choices[1]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == ([" two", "one"], [None, -1])
    assert (logprobs["text_offset"], logprobs["top_logprobs"]) == ([0, 4], [None, {" two": -0.5, "one": -1}])


def test_each_prompt_is_the_echo_of_its_own_choices() -> None:
    made = completion(prompt=["A", [1], "C"], echo=True, n=2)
    messages = [
        (i, message(*(pb.SequenceDelta(index=k, text=f"{i}{k}", finish_reason=END) for k in range(2))))
        for i in (2, 0, 1)
    ]
    messages[2][1].prompt_info.token_ids.append(1)
    choices = made.whole(taken(made, *messages))["choices"]
    assert [choice["text"] for choice in choices] == ["A00", "A01", "one10", "one11", "C20", "C21"]


def test_an_echo_of_a_prompt_that_was_cut_is_what_is_left() -> None:
    made = completion(echo=True, truncate_prompt_tokens=2)
    begun = message(pb.SequenceDelta(text="c", finish_reason=END))
    begun.prompt_info.token_ids.extend([1, 2])
    assert made.whole(taken(made, (0, begun)))["choices"][0]["text"] == "one twoc"


def prompted(*deltas: pb.SequenceDelta, ids: tuple[int, ...] = (1, 2)) -> pb.StreamGenerateResponse:
    """The first message of a prompt's stream."""
    made = message(*deltas)
    made.prompt_info.CopyFrom(pb.PromptInfo(token_count=len(ids), token_ids=ids))
    return made


CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def usages(events: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """Returns choice, tokens of its prompt, of it, and of both, by event."""
    return [(e["choices"][0]["index"], *(e["usage"][name] for name in COUNTS)) for e in events]


COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def test_each_chunk_has_its_choices_counts_so_far() -> None:
    made = completion(prompt=["A", "B"], n=2, echo=True, **CONTINUOUS)
    pieces = taken(
        made,
        (1, prompted(pb.SequenceDelta(text="a", token_count=1), ids=(1, 2, 3))),
        (0, prompted(pb.SequenceDelta(index=1, text="b", token_count=2))),
        (1, message(pb.SequenceDelta(token_count=1))),
        (1, prompted(pb.SequenceDelta(text="c", token_count=3, finish_reason=END), ids=(1, 2, 3))),
    )
    assert usages(parsed(Events(made).encode(pieces))) == [
        (2, 3, 0, 3), (3, 3, 0, 3), (2, 3, 1, 4), (0, 2, 0, 2), (1, 2, 0, 2), (1, 2, 2, 4), (2, 3, 5, 8),
    ]  # fmt: skip
    made = chat(**CONTINUOUS)
    pieces = taken(made, (0, prompted(pb.SequenceDelta(text="a", token_count=1))))
    assert usages(parsed(Events(made).encode(pieces))) == [(0, 2, 0, 2), (0, 2, 1, 3)]
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        made = chat(stream=True, stream_options=options)
        (_, event) = parsed(Events(made).encode(taken(made, (0, prompted(pb.SequenceDelta(text="a", token_count=1))))))
        assert event.get("usage") is None
        assert ("usage" in event) == ("include_usage" in options)


def test_ids_stand_where_vllm_has_them() -> None:
    deltas = [
        (0, prompted(pb.SequenceDelta(text="a", token_ids=[4], token_count=1))),
        (0, message(pb.SequenceDelta(token_ids=[5, 1], token_count=2))),
        (0, message(pb.SequenceDelta(text="c", token_ids=[2], token_count=1, finish_reason=END))),
    ]
    made = chat(return_token_ids=True)
    whole = made.whole(taken(made, *deltas))
    OpenAIChat.model_validate(whole)
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([1, 2], [4, 5, 1, 2])
    made = completion(return_token_ids=True)
    (choice,) = made.whole(taken(made, *deltas))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [4, 5, 1, 2])
    made = chat(return_token_ids=True, stream=True)
    role, *events = parsed(Events(made).encode(taken(made, *deltas)))
    assert role["prompt_token_ids"] == [1, 2]
    assert [event["choices"][0]["token_ids"] for event in events] == [[4], [5, 1], [2]]
    assert not any("prompt_token_ids" in event for event in events)
    made = completion(return_token_ids=True, stream=True)
    choices = [event["choices"][0] for event in parsed(Events(made).encode(taken(made, *deltas)))]
    assert [choice["token_ids"] for choice in choices] == [[4], [5, 1], [2]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2], None, None]
    for plain in (chat(), completion()):
        assert "token_ids" not in json.dumps(plain.whole(taken(plain, *deltas)))


def test_logprobs_of_the_prompt_in_vllms_form() -> None:
    begun = message(pb.SequenceDelta(text="c", logprobs=[position((1, -1), (2, -2))], finish_reason=END))
    begun.prompt_info.logprobs.extend([pb.TokenLogprobs(), position((1, -3), (2, -float("inf")), (3, -0.5))])
    begun.prompt_info.logprobs[1].tokens[0].rank = 2
    expected = [
        None,
        {
            1: {"logprob": -3, "rank": 2, "decoded_token": "one"},
            3: {"logprob": -0.5, "rank": 0, "decoded_token": "\ufffd"},
        },
    ]
    made = completion(prompt_logprobs=1, n=2)
    (choice,) = made.whole(taken(made, (0, begun)))["choices"]
    assert (choice["prompt_logprobs"], choice["logprobs"]) == (expected, None)
    made = chat(prompt_logprobs=1)
    whole = made.whole(taken(made, (0, begun)))
    assert (whole["prompt_logprobs"], whole["choices"][0]["logprobs"]) == (expected, None)
    made = completion(prompt_logprobs=5, return_tokens_as_token_ids=True, logprobs=1)
    (choice,) = made.whole(taken(made, (0, begun)))["choices"]
    assert choice["prompt_logprobs"][1][2]["logprob"] == LEAST
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]) == (["token_id:1"], [{"token_id:1": -1}])


def test_the_id_is_the_clients_where_it_gives_one() -> None:
    assert chat(request_id="a-b").whole([Piece(0, "x", finish="stop")])["id"] == "chatcmpl-a-b"


def test_a_prompt_alone_is_scored() -> None:
    made = completion(prompt=[2, 1], echo=True, logprobs=0, max_tokens=0)
    begun = message(pb.SequenceDelta(text="c", finish_reason=END, logprobs=[position((1, -9))]), prompt=2, out=1)
    begun.prompt_info.logprobs.extend([pb.TokenLogprobs(), position((1, -1))])
    begun.prompt_info.token_ids.extend([2, 1])
    whole = made.whole(taken(made, (0, begun)))
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" twoone", "length")
    assert choice["logprobs"]["tokens"] == [" two", "one"]
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (0, 2)


@pytest.mark.parametrize(
    ("tokens", "wanted", "expected"),
    [
        ([(1, -1.0)], 0, []),
        ([(1, -1.0)], 1, [1]),
        ([(3, -5.0), (1, -1.0), (2, -2.0)], 2, [1, 2]),
        ([(2, -2.0), (1, -1.0)], 2, [1, 2]),
        ([(2, -1.0), (1, -1.0)], 2, [2, 1]),
    ],
)
def test_the_likeliest(tokens: list[tuple[int, float]], wanted: int, expected: list[int]) -> None:
    assert [token.token_id for token in likeliest(position(*tokens), wanted)] == expected


def test_an_answer_is_written_choice_by_choice() -> None:
    answer = {"id": "a", "choices": [{"index": 0, "text": "\u2603"}, {"index": 1, "text": ""}], "usage": {"n": 1}}
    assert json.loads(exhausted(answer_as_json(answer))) == answer
    assert json.loads(exhausted(answer_as_json({"id": "a", "choices": []}))) == {"id": "a", "choices": []}
    long = {
        "choices": [{"logprobs": {"content": [{"token": str(i)} for i in range(1000)]}}],
        "prompt_logprobs": [None, {1: {}}],
    }
    work, turns = answer_as_json(long), 0
    made = exhausted(work)
    assert json.loads(made) == {**long, "prompt_logprobs": [None, {"1": {}}]}
    for _ in answer_as_json(long):
        turns += 1
    assert turns > 1000 / TURN, "each part of a list is a turn"


def test_logprobs_of_long_prompts_leave_turns_to_others() -> None:
    entries = [pb.TokenLogprobs(), *[position((1, -0.5)) for _ in range(10 * TURN)]]
    info = pb.PromptInfo(token_count=len(entries), token_ids=[1] * len(entries), logprobs=entries)
    for made in (chat(prompt_logprobs=1), completion(echo=True, logprobs=1, n=2)):
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def take(made: ApiResponse = made) -> list[Piece]:
            counting = asyncio.create_task(count())
            try:
                return await made.pieces_of(0, pb.StreamGenerateResponse(prompt_info=info))
            finally:
                counting.cancel()

        pieces = asyncio.run(take())
        assert turns >= 10
        assert all(len(piece.logprobs["tokens"]) == len(entries) for piece in pieces)


def test_no_client_sees_two_lines_in_one_event() -> None:
    made = chat(stream=True)
    events = Events(made).encode([Piece(0, "a\u2028b\x85c\u2029\x0bd")])
    texts = [line for line in events.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in texts)
    assert json.loads(texts[-1][6:])["choices"][0]["delta"]["content"] == "a\u2028b\x85c\u2029\x0bd"


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit_exceeded"), (400, "invalid_prompt"), (503, "server_error")]
)
def test_why_a_response_failed_is_a_word_that_clients_know(status: int, code: str) -> None:
    asked = read_responses({"input": "hi", "model": "m", "stream": True})
    made = ModelResponse(asked, Words(), ())  # type: ignore[arg-type]
    event = ResponseEvents(made).failed(ApiError(status, "why", "input", code="OURS"))
    response = OpenAIResponse.model_validate(json.loads(event.decode().split("data: ")[1])["response"])
    assert response.error is not None
    assert (response.error.code, response.error.param, response.error.type) == (code, "input", "OURS")


@pytest.mark.parametrize(("stop", "told"), [("deadline", "deadline"), (None, None)])
def test_a_response_that_is_cut_short_has_a_reason_that_clients_know(stop: str | None, told: str | None) -> None:
    made = ModelResponse(read_responses({"input": "hi", "model": "m"}), Words(), ())  # type: ignore[arg-type]
    whole = made.whole([Piece(0, "a", finish="length", stop=stop)])
    assert whole["incomplete_details"] == {"reason": "max_output_tokens", "stop_reason": told}
    OpenAIResponse.model_validate(whole)


def exhausted(work: Work[bytes]) -> bytes:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value
