"""Server-sent events of an answer in parts. An event's JSON is made once for each choice, but for what changes in it:
text, logprobs and why it ends.
"""

import json
from collections.abc import Iterable
from json.encoder import encode_basestring

from rpc.gateway.answers import Answer, Extra, Piece
from rpc.gateway.logprobs import as_json

DONE = b"data: [DONE]\n\n"
ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
CHAT = "chat.completion.chunk"


class Events:
    """Of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        heading = json.dumps(answer.heading(answer.chunk_kind), separators=(",", ":"))[:-1].encode()
        self._head = b"data: " + heading + b',"choices":['
        self._usage = b',"usage":null' if answer.asked.includes_usage else b""
        self._tail = b"}]" + self._usage + b"}\n\n"
        self._before, self._after = answer.part
        self._plain = self._after + b',"logprobs":null,"finish_reason":null' + self._tail
        self._begun: dict[int, bytes] = {}

    def of(self, pieces: Iterable[Piece]) -> bytes:
        """Those of some pieces, together."""
        return b"".join([self._event(piece) for piece in pieces if not piece.is_empty])

    def _event(self, piece: Piece) -> bytes:
        first, head = b"", self._begun.get(piece.choice)
        if head is None:
            start = self._head + b'{"index":%d,' % piece.choice
            head = self._begun[piece.choice] = start + self._before
            if self._answer.chunk_kind == CHAT:
                first = start + ROLE + self._role_tail(piece.extra)
        text = encode_basestring(piece.text).encode()
        if piece.finish is None and piece.logprobs is None and piece.extra is None:
            return b"".join((first, head, text, self._plain))
        rest = b',"logprobs":' + as_json(piece.logprobs) + b',"finish_reason":' + as_json(piece.finish)
        if piece.finish is not None:
            rest += b',"stop_reason":' + as_json(piece.stop)
        tail = self._tail
        if piece.extra is not None:
            rest += self._in_choice(piece.extra)
            tail = b"}]" + self._counts(piece.extra.counts) + b"}\n\n"
        return b"".join((first, head, text, self._after, rest, tail))

    def _role_tail(self, extra: Extra | None) -> bytes:
        """Returns the end of the event that begins a choice of a chat, before its first token."""
        if extra is None:
            return self._tail
        counts = extra.counts and (extra.counts[0], 0)
        return b"}]" + self._counts(counts) + _field(b"prompt_token_ids", extra.prompt_ids) + b"}\n\n"

    def _in_choice(self, extra: Extra) -> bytes:
        prompt = _field(b"prompt_token_ids", extra.prompt_ids) if self._answer.prompt_in_choices else b""
        return prompt + _field(b"token_ids", extra.token_ids)

    def _counts(self, counts: tuple[int, int] | None) -> bytes:
        if counts is None:
            return self._usage
        given = (*counts, sum(counts))
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % given

    def usage(self) -> bytes:
        """The last one, if the client wants it."""
        if not self._answer.asked.includes_usage:
            return b""
        return self._head + b'],"usage":' + as_json(self._answer.usage()) + b"}\n\n"


def _field(name: bytes, value: list[int] | None) -> bytes:
    return b"" if value is None else b',"%b":' % name + as_json(value)


def error_event(body: bytes) -> bytes:
    """body: JSON."""
    return b"event: error\ndata: " + body + b"\n\n"
