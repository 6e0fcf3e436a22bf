"""Server-sent events of a streamed response.

An event's JSON is made once for each choice. An event adds only its text, logprobs and finish reason, since this code
runs for each token of each stream.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

from rpc.gateway.answers import ApiResponse, Extra, Piece
from rpc.gateway.errors import ApiError
from rpc.gateway.logprobs import as_json

DONE = b"data: [DONE]\n\n"
ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
CHAT = "chat.completion.chunk"


LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Characters, and JSON's escapes of them. They end no line of events, but some clients read them as line ends."""


def quoted(text: str) -> bytes:
    """Returns a text as JSON, on one line for any client."""
    made = encode_basestring(text)
    return (made if text.isascii() else made.translate(LINE_ENDS)).encode()


class Events:
    """Encodes the events of one response."""

    def __init__(self, response: ApiResponse) -> None:
        self._response = response
        heading = json.dumps(response.heading(response.chunk_kind), separators=(",", ":"))[:-1].encode()
        self._head = b"data: " + heading + b',"choices":['
        self._usage = b',"usage":null' if response.asked.includes_usage else b""
        self._tail = b"}]" + self._usage + b"}\n\n"
        self._before, self._after = response.part
        self._plain = self._after + b',"logprobs":null,"finish_reason":null' + self._tail
        self._begun: dict[int, bytes] = {}

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        """Returns the events of some pieces, concatenated."""
        return b"".join([self._event(piece) for piece in pieces if not piece.is_empty])

    def _event(self, piece: Piece) -> bytes:
        first, head = b"", self._begun.get(piece.choice)
        if head is None:
            start = self._head + b'{"index":%d,' % piece.choice
            head = self._begun[piece.choice] = start + self._before
            if self._response.chunk_kind == CHAT:  # a chat's first event has the role alone, as with OpenAI
                first = start + ROLE + self._role_tail(piece.extra)
        if piece.reasoning or piece.calls:
            first, head = first + self._beside_text(piece, start=self._head + b'{"index":%d,' % piece.choice), head
            piece = replace(piece, reasoning="", calls=(), text="" if piece.calls else piece.text)
            if piece.is_empty:
                return first
        text = quoted(piece.text)
        if piece.finish is None and piece.logprobs is None and piece.extra is None:  # most events: text alone
            return b"".join((first, head, text, self._plain))
        rest = b',"logprobs":' + as_json(piece.logprobs) + b',"finish_reason":' + as_json(piece.finish)
        if piece.finish is not None:
            rest += b',"stop_reason":' + as_json(piece.stop)
        tail = self._tail
        if piece.extra is not None:
            rest += self._in_choice(piece.extra)
            tail = b"}]" + self._counts(piece.extra.counts) + b"}\n\n"
        return b"".join((first, head, text, self._after, rest, tail))

    def _beside_text(self, piece: Piece, start: bytes) -> bytes:
        """Returns the events of a piece's reasoning and calls, and of text before calls."""
        deltas: list[dict[str, Any]] = [{"reasoning_content": piece.reasoning}] if piece.reasoning else []
        calls = list(piece.calls)
        if calls and "id" not in calls[0]:  # the end of a call, which came before the text
            deltas.append({"tool_calls": [calls.pop(0)]})
        deltas += [{"content": piece.text}] if piece.calls and piece.text else []
        deltas += [{"tool_calls": calls}] if calls else []
        counts = self._usage if piece.extra is None else self._counts(piece.extra.counts)
        tail = b',"logprobs":null,"finish_reason":null}]' + counts + b"}\n\n"
        return b"".join([start + b'"delta":' + as_json(delta) + tail for delta in deltas])

    def _role_tail(self, extra: Extra | None) -> bytes:
        """Returns the end of the event that begins a choice of a chat, before its first token."""
        if extra is None:
            return self._tail
        counts = extra.counts and (extra.counts[0], 0)
        return b"}]" + self._counts(counts) + _field(b"prompt_token_ids", extra.prompt_ids) + b"}\n\n"

    def _in_choice(self, extra: Extra) -> bytes:
        prompt = _field(b"prompt_token_ids", extra.prompt_ids) if self._response.prompt_in_choices else b""
        return prompt + _field(b"token_ids", extra.token_ids)

    def _counts(self, counts: tuple[int, int] | None) -> bytes:
        if counts is None:
            return self._usage
        values = (*counts, sum(counts))
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % values

    def end(self) -> bytes:
        """Returns the last events: token counts, if the client wants them, and the end of the stream."""
        if not self._response.asked.includes_usage:
            return DONE
        return self._head + b'],"usage":' + as_json(self._response.usage()) + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """Returns the event of a failure that came after the first one."""
        return b"event: error\ndata: " + error.body + b"\n\n"


def _field(name: bytes, value: list[int] | None) -> bytes:
    return b"" if value is None else b',"%b":' % name + as_json(value)
