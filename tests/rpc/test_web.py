"""What the page's server refuses, and what it makes of a body; without a browser."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.frontend.errors import RequestFailed
from rpc.web.guard import refusal
from rpc.web.prompts import spec_in

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
        spec_in(body)
    assert refused.value.code == "INVALID_ARGUMENT"


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: b'{"prompt": ' + text.encode("utf-8", "replace")))
def test_any_bytes_are_a_spec_or_refused(body: bytes) -> None:
    with suppress(RequestFailed):
        spec_in(body)
