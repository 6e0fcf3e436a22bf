"""Runs prompts typed into the dashboard, and streams their answers as lines of JSON."""

import asyncio
import json
import re
import secrets
from typing import Any

from quire.v1 import generation_service_pb2 as pb
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from rpc.access.authentication import AuthenticationInterceptor
from rpc.client.specs import spec_of
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.services import convert
from rpc.services.errors import as_failure
from rpc.services.writer import SlowReader, StreamWriter
from rpc.web.errors import error_of, response_of
from rpc.web.presence import while_there

MOST_BYTES = 2**20  # bytes of a body
BODY_SECONDS = 30.0
SEED = re.compile("[0-9]{1,20}")  # as text, since JavaScript's numbers lack 64-bit integers
FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,), "chat": (bool,), "max_tokens": (int,), "temperature": (int, float), "seed": (int, str),
}  # fmt: skip


class Prompts:
    """ASGI application for POST of a JSON object with `prompt` and other `FIELDS`.

    The response's lines are objects: {text} as it comes, then one with the finish reason, token counts and seed; or
    {error}. The request ends if its client leaves.
    """

    def __init__(self, frontend: Frontend, authentication: AuthenticationInterceptor) -> None:
        self._frontend, self._authentication = frontend, authentication

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        lines = Lines(send)
        try:
            tenant = self._authentication.authenticate_operator(request.headers).tenant
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                failure = RequestFailed("INVALID_ARGUMENT", "NOT_JSON", "the content type must be application/json")
                await response_of(failure, 415)(scope, receive, send)
                return
            spec = spec_in(await _body(request))
            await while_there(receive, self._answer(spec, tenant, lines))
        except ClientDisconnect:
            pass
        except Exception as error:
            failure = as_failure(error)
            if lines.begun:
                await lines.write(error_of(failure))
                await lines.end()
            else:
                await response_of(failure)(scope, receive, send)

    async def _answer(self, message: pb.GenerationSpec, tenant: str, lines: "Lines") -> None:
        """Runs a request, and writes its lines. Raises RequestFailed."""
        spec = convert.spec_from(message, tenant)
        writer = StreamWriter(lines, self._frontend.settings.write_stall)
        async with self._frontend.open(spec, f"dashboard-{secrets.token_hex(8)}", None) as live:
            try:
                await writer.run(_stream(live, writer))
            except SlowReader as slow:
                slow.writing.cancel()  # the line with the error takes its place
                raise
        await lines.end()


async def _stream(live: Live, writer: StreamWriter) -> None:
    """Writes a request's text as it comes, then its figures. Raises the stream's failure."""
    stream, ended = live.stream, False
    while not ended:
        await live.wait()
        if stream.failure is not None:
            raise stream.failure
        ended = stream.ended
        text = "".join(delta.text for delta in stream.take())
        if text:
            await writer.write({"text": text})
    finish = stream.sequences[0].finish
    usage = convert.usage(stream)
    await writer.write(
        {
            "finish": "" if finish is None else finish.reason.value,
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "seed": str(stream.request.controls.seed),  # as text: JavaScript's numbers lack 64-bit integers
        }
    )


class Lines:
    """A response of JSON lines.

    Attributes:
        begun: Whether its status has been sent.
    """

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def write(self, value: Any) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"application/x-ndjson")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = json.dumps(value).encode() + b"\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(request: Request) -> bytes:
    """Reads the body. Raises RequestFailed if it is too large or too slow, ClientDisconnect."""
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    message = f"the body has more than {MOST_BYTES} bytes"
                    raise RequestFailed("INVALID_ARGUMENT", "BODY_TOO_LARGE", message)
    except TimeoutError:
        message = f"the body was not there after {BODY_SECONDS:.0f} s"
        raise RequestFailed("DEADLINE_EXCEEDED", "SLOW_BODY", message) from None
    return body


def spec_in(body: bytes) -> pb.GenerationSpec:
    """Returns the request of a JSON body. The form is checked here, values later, like those of every request.

    Raises:
        RequestFailed: The body has no form of a request.
    """
    try:
        fields = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestFailed("INVALID_ARGUMENT", "NOT_JSON", f"the body is no JSON: {error}"[:200]) from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "prompt must be a text", field="prompt")
    for name, value in fields.items():
        # In Python a bool is an int; in JSON it is none.
        if name not in FIELDS or not isinstance(value, FIELDS[name]) or (isinstance(value, bool) != (name == "chat")):
            what = "is not known" if name not in FIELDS else "is of the wrong kind"
            raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", f"{name[:60]} {what}", field=name[:60])
    text, chat = fields.pop("prompt"), fields.pop("chat", False)
    if isinstance(seed := fields.get("seed"), str):
        if not SEED.fullmatch(seed):
            message = f"seed is {seed[:60]!r}, must be a whole number"
            raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", message, field="seed")
        fields["seed"] = int(seed)
    try:
        # The dashboard shows what the model writes, its reasoning too.
        return (
            spec_of([{"role": "user", "content": text}], raw_text=True, **fields) if chat else spec_of(text, **fields)
        )
    except (ValueError, TypeError, OverflowError) as error:  # a value that its field cannot hold
        raise RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", str(error)[:200]) from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")
