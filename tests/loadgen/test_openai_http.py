"""Streams of servers other than Quire's gateway: what they send is read as it means, and what breaks is a failure."""

import asyncio
import json
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trustme

from rpc.client.security import Security
from rpc.loadgen.observation import Observation
from rpc.loadgen.openai_http import OpenAI
from rpc.loadgen.wire import Failed, LoadRequest, ServedModel

KEY = "key-" + "k" * 5
HEAD = "HTTP/1.1 {} X\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"


def chunk(text: str | None, usage: tuple[int, int] | None = None, **more: Any) -> str:
    event: dict[str, Any] = {"choices": [{"text": text}] if text is not None else [], **more}
    if usage is not None:
        event["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return f"data: {json.dumps(event)}\r\n\r\n"


class Server:
    """Sends ready-made parts, one after the other, to any client. heard: what was asked."""

    def __init__(self, parts: list[str], status: int = 200) -> None:
        self._parts, self._status = parts, status
        self.heard = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in self.heard.lower():
            size = int(self.heard.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.heard += await reader.readexactly(size)
        writer.write(HEAD.format(self._status).encode())
        for part in self._parts:
            writer.write(part.encode())
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()


def with_client(
    server: Server,
    use: Callable[[OpenAI], Coroutine[Any, Any, Any]],
    tls: ssl.SSLContext | None = None,
    roots: bytes | None = None,
) -> Any:
    """tls: of the server. roots: whom the client trusts."""

    async def run() -> Any:
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=tls)
        port = listening.sockets[0].getsockname()[1]
        scheme = "http" if tls is None else "https"
        client = OpenAI(f"{scheme}://127.0.0.1:{port}/v1", "", Security(token=KEY, roots=roots), True, None)
        try:
            async with asyncio.timeout(10):
                return await use(client)
        finally:
            await client.close()
            listening.close()

    return asyncio.run(run())


def sent(parts: list[str], status: int = 200) -> Observation:
    async def send(client: OpenAI) -> Observation:
        seen = Observation(0.0, (3, 5))
        await client.send(LoadRequest(1, "a b c", 3, 5), seen)
        return seen

    seen: Observation = with_client(Server(parts, status), send)
    return seen


DONE = "data: [DONE]\n\n"


def test_usage_in_the_last_event_counts() -> None:
    seen = sent([chunk("a", usage=None), chunk(""), chunk("bc", finish_reason=None), chunk(None, (7, 5)), DONE])
    assert (seen.prompt_tokens, seen.tokens, len(seen.times)) == (7, 5, 2)
    assert sorted(seen.gaps())[:3] == [0, 0, 0], "five tokens in two messages"
    assert len(seen.gaps()) == 4


@pytest.mark.parametrize(
    ("details", "cached"), [({"cached_tokens": 4}, 4), ({"cached_tokens": None}, None), ({}, None), (None, None)]
)
def test_cached_tokens_are_read_where_the_server_says_them(details: dict | None, cached: int | None) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": details}
    assert (
        sent([chunk("a"), "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n", DONE]).cached_tokens
        == cached
    )


def test_usage_in_every_event_counts_once() -> None:
    assert sent([chunk("a", (7, 1)), chunk("b", (7, 2)), chunk("c", (7, 4)), DONE]).tokens == 4


def test_without_usage_chunks_are_tokens() -> None:
    seen = sent([": hello\n\n", chunk("a"), chunk("b"), "event: x\n" + chunk("c"), DONE])
    assert (seen.prompt_tokens, seen.tokens) == (0, 3)


@pytest.mark.parametrize(
    ("ends", "finish"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": "length", "stop_reason": "deadline"}, "deadline"),
        ({"finish_reason": "length", "stop_reason": "abort"}, "abort"),
        ({"finish_reason": "stop", "stop_reason": "deadline"}, "stop"),
    ],
)
def test_what_cut_an_answer_short_is_known(ends: dict, finish: str) -> None:
    last = "data: " + json.dumps({"choices": [{"text": "", **ends}]}) + "\n\n"
    assert sent([chunk("a"), last, DONE]).finish == finish


def test_events_may_be_cut_anywhere() -> None:
    whole = chunk("a\u00fc") + chunk("b") + chunk(None, (2, 2)) + DONE
    seen = sent(list(whole))
    assert (seen.tokens, len(seen.times)) == (2, 2)


@pytest.mark.parametrize(
    ("parts", "status", "code", "said"),
    [
        ([chunk("a")], 200, "CUT_OFF", "without [DONE]"),
        ([chunk("a"), 'data: {"error": {"code": 503, "message": "lost"}}\n\n', DONE], 200, "503", "lost"),
        (["data: nothing\n\n"], 200, "BAD_ANSWER", "nothing"),
        (["data: [1]\n\n"], 200, "BAD_ANSWER", "[1]"),
        (['{"error": {"message": "too many", "type": "x"}}'], 429, "HTTP 429", "too many"),
        (["<html>"], 502, "HTTP 502", "<html>"),
    ],
)
def test_failures_have_a_code_and_what_was_said(parts: list[str], status: int, code: str, said: str) -> None:
    with pytest.raises(Failed) as failure:
        sent(parts, status)
    assert failure.value.code == code
    assert said in failure.value.message


def test_models_and_their_context_are_found() -> None:
    async def find(client: OpenAI) -> ServedModel:
        return await client.find()

    server = Server([json.dumps({"data": [{"id": "m", "max_model_len": 4096}, {"id": "n"}]})])
    assert with_client(server, find) == ServedModel("m", 4096)
    assert f"Bearer {KEY}".encode() in server.heard
    with pytest.raises(Failed, match="is no list of models"):
        with_client(Server(["[]"]), find)
    with pytest.raises(Failed, match="HTTP 401: who"):
        with_client(Server(['{"error": {"message": "who"}}'], 401), find)


def test_servers_with_certificates_are_trusted_by_who_signed_them() -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)

    async def find(client: OpenAI) -> ServedModel:
        return await client.find()

    server = Server([json.dumps({"data": [{"id": "m"}]})])
    assert with_client(server, find, tls, authority.cert_pem.bytes()) == ServedModel("m")
    for roots in (None, stranger.cert_pem.bytes()):
        with pytest.raises(Failed, match="CERTIFICATE_VERIFY_FAILED"):
            with_client(server, find, tls, roots)


def test_what_is_asked_is_openais() -> None:
    server = Server([chunk("a"), DONE])

    async def send(client: OpenAI) -> None:
        await client.send(LoadRequest(9, [4, 5], 2, 6), Observation(0.0, (2, 6)))

    with_client(server, send)
    body = json.loads(server.heard.partition(b"\r\n\r\n")[2])
    assert body == {
        "model": "", "prompt": [4, 5], "max_tokens": 6, "seed": 9, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
