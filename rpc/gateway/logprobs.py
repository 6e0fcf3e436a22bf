"""Logprobs in the forms of OpenAI's two endpoints, made of quire.v1's token ids and the tokens' texts."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.pacing import Work
from rpc.gateway.served import BROKEN

LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks
TURN = 64  # positions that are made, or encoded, in one turn of the loop: 3 ms with 20 alternatives each

Texts = Mapping[int, str]
PromptLogprobs = list[dict[int, dict[str, Any]] | None]


def ids_in(positions: Iterable[pb.TokenLogprobs]) -> Iterator[int]:
    """Yields all tokens whose texts are needed."""
    for position in positions:
        for token in position.tokens:
            yield token.token_id


async def in_turns(positions: Sequence[pb.TokenLogprobs]) -> AsyncGenerator[Sequence[pb.TokenLogprobs], None]:
    """Yields the positions of a prompt in parts, between which the loop serves others."""
    for start in range(0, len(positions), TURN):
        yield positions[start : start + TURN]
        await asyncio.sleep(0)


def chat_entries(positions: Iterable[pb.TokenLogprobs], wanted: int, texts: Texts) -> list[dict[str, Any]]:
    """Returns one entry for each position, with `wanted` alternatives."""
    return [
        _entry(position.tokens[0], texts) | {"top_logprobs": [_entry(t, texts) for t in likeliest(position, wanted)]}
        for position in positions
    ]


def _entry(token: pb.TokenLogprob, texts: Texts) -> dict[str, Any]:
    """Returns a token's entry. Its `bytes` are None if the token is a part of a character, whose bytes are unknown."""
    text = texts[token.token_id]
    known = None if BROKEN in text else list(text.encode())
    return {"token": text, "logprob": max(LEAST, token.logprob), "bytes": known}


def likeliest(position: pb.TokenLogprobs, wanted: int) -> list[pb.TokenLogprob]:
    """Returns the `wanted` likeliest tokens. A position lists the chosen token first, which may not be among them."""
    return sorted(position.tokens, key=lambda token: -token.logprob)[:wanted]


class CompletionLogprobs:
    """Logprobs of one choice of /v1/completions. Offsets count characters of its text, an echoed prompt included."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._offset = wanted, 0

    def add(self, positions: Iterable[pb.TokenLogprobs], texts: Texts, first: int | None = None) -> dict[str, Any]:
        """Returns the logprobs of the next tokens.

        Args:
            positions: Logprobs by position.
            texts: Texts of all their tokens.
            first: Token before these that begins a prompt, and so has no logprob.
        """
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first is not None:
            self._token(made, texts[first], None, None)
        for position in positions:
            chosen = position.tokens[0]
            tops = dict[str, float]()
            for token in (*likeliest(position, self._wanted), chosen):  # of two with the same text the likelier stays
                tops.setdefault(texts[token.token_id], max(LEAST, token.logprob))
            self._token(made, texts[chosen.token_id], max(LEAST, chosen.logprob), tops)
        return made

    def _token(
        self, made: dict[str, list[Any]], text: str, logprob: float | None, tops: dict[str, float] | None
    ) -> None:
        made["tokens"].append(text)
        made["token_logprobs"].append(logprob)
        made["top_logprobs"].append(tops)
        made["text_offset"].append(self._offset)
        self._offset += len(text)


def prompt_logprobs(positions: Iterable[pb.TokenLogprobs], wanted: int, texts: Texts) -> PromptLogprobs:
    """Returns vLLM's form: by position, by token id, with `wanted` alternatives; None for the first token."""
    return [
        {
            token.token_id: {
                "logprob": max(LEAST, token.logprob),
                "rank": token.rank,
                "decoded_token": texts[token.token_id],
            }
            for token in (position.tokens[0], *likeliest(position, wanted))
        }
        if position.tokens
        else None
        for position in positions
    ]


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Joins the parts of one choice; returns None without parts."""
    if not parts:
        return None
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def as_json(value: Any) -> bytes:
    """Returns compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def answer_as_json(answer: Mapping[str, Any]) -> Work[bytes]:
    """Returns paced work that encodes a response choice by choice, and their lists in parts.

    Eight choices of 900 tokens with 20 logprobs each are megabytes, which would block the loop for too long.
    """
    choices = list[bytes]()
    for choice in answer["choices"]:
        choices.append((yield from _object(choice)))
    rest = yield from _object({name: value for name, value in answer.items() if name != "choices"})
    return rest[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


def _object(value: Mapping[str, Any]) -> Work[bytes]:
    """Returns paced work that encodes an object, the lists of its fields in parts of `TURN` items."""
    fields = list[bytes]()
    for name, one in value.items():
        made = yield from _object(one) if isinstance(one, dict) else _list(one) if isinstance(one, list) else _one(one)
        fields.append(as_json(name) + b":" + made)
    return b"{" + b",".join(fields) + b"}"


def _list(items: list[Any]) -> Work[bytes]:
    parts = list[bytes]()
    for start in range(0, len(items), TURN):
        parts.append(as_json(items[start : start + TURN])[1:-1])
        yield
    return b"[" + b",".join(parts) + b"]"


def _one(value: Any) -> Work[bytes]:
    yield
    return as_json(value)
