"""The dashboard's server refuses requests, and reads bodies; without a browser."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.access.authentication import NO_AUTHENTICATION
from rpc.frontend.errors import RequestFailed
from rpc.web.errors import response_of
from rpc.web.guard import refusal
from rpc.web.prompts import MOST_BYTES, Prompts, spec_in

OWN = [("host", "127.0.0.1:9465")]


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        [("host", "localhost:80")],
        [("host", "localhost")],
        [*OWN, ("origin", "http://127.0.0.1:9465"), ("sec-fetch-site", "same-origin")],
        [*OWN, ("sec-fetch-site", "none")],
    ],
)
def test_its_own_pages_may_ask(headers: list[tuple[str, str]]) -> None:
    assert refusal(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "")],
        [("host", "evil.example:9465")],
        [("host", "127.0.0.1.evil.example")],
        [("host", "localhost@evil.example")],
        [("host", "evil.example@localhost:9465")],
        [("host", "127.0.0.1:x")],
        [*OWN, ("host", "evil.example")],
        [("host", "evil.example"), *OWN],
        [*OWN, ("origin", "http://evil.example")],
        [*OWN, ("origin", "null")],
        [*OWN, ("origin", "")],
        [*OWN, ("origin", "http://127.0.0.1:8000")],
        [*OWN, ("origin", "https://127.0.0.1:9465")],
        [*OWN, ("origin", "http://127.0.0.1:9465"), ("origin", "http://evil.example")],
        [*OWN, ("sec-fetch-site", "cross-site")],
        [*OWN, ("sec-fetch-site", "same-site")],
    ],
)
def test_others_may_not(headers: list[tuple[str, str]]) -> None:
    assert refusal(headers) is not None


def test_a_body_is_a_spec() -> None:
    spec = spec_in(b'{"prompt": "a", "max_tokens": 3, "temperature": 0, "seed": 18446744073709551615}')
    assert (spec.text, spec.stopping.max_tokens, spec.sampling.temperature) == ("a", 3, 0)
    assert spec.sampling.seed == 2**64 - 1
    assert spec_in(b'{"prompt": "a", "seed": "18446744073709551615"}').sampling.seed == 2**64 - 1
    assert not spec_in(b'{"prompt": "a"}').sampling.HasField("seed")
    chat = spec_in(b'{"prompt": "a", "chat": true}').chat
    assert [(turn.role, turn.parts[0].text) for turn in chat.messages] == [("user", "a")]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"prompt": 1}', b'{"prompt": "a", "model": "b"}', b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": "a", "max_tokens": true}', b'{"prompt": "a", "chat": 1}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "seed": 18446744073709551616}', b"\xff", b"[" * 100_000,
        b'{"prompt": "a", "seed": "18446744073709551616"}', b'{"prompt": "a", "seed": ""}',
        b'{"prompt": "a", "seed": "-1"}', b'{"prompt": "a", "seed": "1_0"}',
        b'{"prompt": "a", "seed": "' + "\u0661".encode() + b'"}',
        b'{"prompt": "a", "max_tokens": "3"}', b'{"prompt": "a", "seed": "' + b"9" * 5000 + b'"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_as_one(body: bytes) -> None:
    with pytest.raises(RequestFailed) as refused:
        assert spec_in(body).WhichOneof("prompt") in ("text", "chat")
    assert refused.value.code == "INVALID_ARGUMENT"


async def sent(parts: int) -> tuple[int, bytes, int]:
    """Sends parts of 64 KiB, without an end; returns the answer's status and body, and the parts that were read."""
    read, answers = 0, list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b" " * 2**16, "more_body": read < parts}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/generate", "query_string": b"", "headers": headers}
    await Prompts(None, NO_AUTHENTICATION)(scope, receive, send)  # type: ignore[arg-type]
    return answers[0]["status"], answers[1]["body"], read


async def test_a_body_that_does_not_end_is_read_no_further_than_its_limit() -> None:
    status, body, read = await sent(parts=1000)
    assert (status, json.loads(body)["error"]["reason"]) == (400, "BODY_TOO_LARGE")
    assert read == MOST_BYTES // 2**16 + 1
    status, body, read = await sent(parts=MOST_BYTES // 2**16)
    assert (status, json.loads(body)["error"]["reason"], read) == (400, "NOT_JSON", MOST_BYTES // 2**16)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400), ("UNAUTHENTICATED", 401), ("PERMISSION_DENIED", 403), ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 409), ("FAILED_PRECONDITION", 409), ("RESOURCE_EXHAUSTED", 429), ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504), ("INTERNAL", 500), ("UNKNOWN", 500),
    ],
)  # fmt: skip
def test_a_failure_has_http_s_status(code: str, status: int) -> None:
    answer = response_of(RequestFailed(code, "REASON", "why"))
    assert (answer.status_code, json.loads(answer.body)) == (status, {"error": {"reason": "REASON", "message": "why"}})


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: b'{"prompt": ' + text.encode("utf-8", "replace")))
def test_any_bytes_are_a_spec_or_refused(body: bytes) -> None:
    with suppress(RequestFailed):
        assert spec_in(body).WhichOneof("prompt") in ("text", "chat")
