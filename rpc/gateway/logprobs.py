"""Logprobs in the forms of OpenAI's two endpoints, from quire.v1's ids and the tokens' texts."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.pacing import Work
from rpc.gateway.served import BROKEN

LEAST = -9999.0  # what OpenAI says for minus infinity, which JSON has not

Texts = Mapping[int, str]
PromptLogprobs = list[dict[int, dict[str, Any]] | None]


def ids_in(positions: Iterable[pb.TokenLogprobs]) -> Iterator[int]:
    """All tokens whose texts are needed."""
    for position in positions:
        for token in position.tokens:
            yield token.token_id


def chat_entries(positions: Iterable[pb.TokenLogprobs], wanted: int, texts: Texts) -> list[dict[str, Any]]:
    """One for each position. wanted: alternatives."""
    return [
        _entry(position.tokens[0], texts) | {"top_logprobs": [_entry(t, texts) for t in likeliest(position, wanted)]}
        for position in positions
    ]


def _entry(token: pb.TokenLogprob, texts: Texts) -> dict[str, Any]:
    """bytes: None where the token is a part of a character: what it adds cannot be told from its text."""
    text = texts[token.token_id]
    known = None if BROKEN in text else list(text.encode())
    return {"token": text, "logprob": max(LEAST, token.logprob), "bytes": known}


def likeliest(position: pb.TokenLogprobs, wanted: int) -> list[pb.TokenLogprob]:
    """The so many likeliest tokens. In a position the chosen one comes first, whether it is one of them or not."""
    return sorted(position.tokens, key=lambda token: -token.logprob)[:wanted]


class CompletionLogprobs:
    """Of one choice of /v1/completions; offsets count characters of its text, the prompt's too where it is echoed."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._offset = wanted, 0

    def add(self, positions: Iterable[pb.TokenLogprobs], texts: Texts, first: int | None = None) -> dict[str, Any]:
        """first: a token before these, of which nothing is known; it begins a prompt."""
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first is not None:
            self._token(made, texts[first], None, None)
        for position in positions:
            chosen = position.tokens[0]
            tops = dict[str, float]()
            for token in (*likeliest(position, self._wanted), chosen):  # of two that read alike the likelier one stays
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
    """Returns vLLM's form: by position, by token id; None for the first token. wanted: alternatives."""
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
    """Parts of one choice as one; None of none."""
    if not parts:
        return None
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def answer_as_json(answer: Mapping[str, Any]) -> Work[bytes]:
    """Work that writes an answer choice by choice: eight of 900 tokens with 20 logprobs each are megabytes."""
    choices = list[bytes]()
    for choice in answer["choices"]:
        choices.append(as_json(choice))
        yield
    rest = as_json({name: value for name, value in answer.items() if name != "choices"})
    return rest[:-1] + b',"choices":[' + b",".join(choices) + b"]}"
