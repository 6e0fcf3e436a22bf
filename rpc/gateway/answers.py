"""Responses of both endpoints: turns servers' messages into choices, pieces and token counts."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.client.security import Metadata
from rpc.frontend.pacing import Work
from rpc.gateway.logprobs import PromptLogprobs, answer_as_json, ids_in, in_turns, prompt_logprobs
from rpc.gateway.schema import CommonRequest
from rpc.gateway.served import ServedModels

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",
    pb.FINISH_REASON_ABORTED: "length",
    pb.FINISH_REASON_CLOSED: "stop",  # OpenAI has no other word for a complete output
}
CUT_SHORT = {pb.FINISH_REASON_DEADLINE: "deadline", pb.FINISH_REASON_ABORTED: "abort"}
"""`stop_reason` of outputs that OpenAI has no finish reason for; theirs is "length", since the text is incomplete."""
GROUP = 64  # tokens of a message, if the client does not stream


@dataclass(frozen=True, slots=True)
class Extra:
    """vLLM's optional fields of a piece.

    Attributes:
        token_ids: New tokens; None if the client does not want token ids.
        prompt_ids: Tokens of the prompt, in the first piece of a choice.
        counts: Number of prompt tokens, and of the choice's tokens so far; None if the client does not want them.
    """

    token_ids: list[int] | None
    prompt_ids: list[int] | None
    counts: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice.

    Attributes:
        choice: Index over all prompts.
        text: New text.
        logprobs: Logprobs of the new tokens, in the endpoint's form.
        finish: OpenAI's finish reason; None before the end.
        stop: vLLM's `stop_reason`: the requested stop string or token that ended the choice, or a cause of `CUT_SHORT`.
        extra: vLLM's optional fields.
        reasoning: New text of the reasoning.
        calls: New parts of tool calls, as in OpenAI's chunks.
    """

    choice: int
    text: str
    logprobs: Any = None
    finish: str | None = None
    stop: str | int | None = None
    extra: Extra | None = None
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the piece needs no event: it has no text, calls, logprobs, token ids or end."""
        has_output = self.text or self.reasoning or self.calls or self.logprobs or self.finish
        return not (has_output or (self.extra and self.extra.token_ids))


class ApiResponse(ABC):
    """The response to one HTTP request, made of its prompts' streams.

    Choices are numbered over all prompts; those of one prompt are consecutive. Call `begin` first, and `pieces_of` with
    each message. Then call `whole` with all pieces or, for a stream, write the pieces as events.

    Attributes:
        prompt_in_choices: Whether vLLM's fields about the prompt stand in the choices rather than beside them.
        kind: "object" of the whole response.
        chunk_kind: "object" of a chunk.
        prefix: Start of the response's id.
        part: JSON before and after a chunk's text.
        asked: The request.
        model: Name of the model that answers.
        fingerprint: Fingerprint of that model; None if no server has reported it.
        response_id: Id of the response.
        created: Time of the request, in seconds since 1970.
    """

    prompt_in_choices: bool
    kind: str
    chunk_kind: str
    prefix: str
    part: tuple[bytes, bytes]

    def __init__(self, asked: CommonRequest, served: ServedModels, metadata: Metadata) -> None:
        self.asked, self._served, self._metadata = asked, served, metadata
        self.model = asked.model or ""
        self.fingerprint: str | None = None
        self.response_id, self.created = self.prefix + (asked.request_id or secrets.token_hex(12)), int(time.time())
        self._stop_ids = frozenset(asked.stop_token_ids or ())
        self._usages: dict[int, pb.Usage] = {}
        self._prompts: dict[int, pb.PromptInfo] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._counts: dict[int, int] = {}
        self._has_extras = bool(asked.return_token_ids) or asked.counts_continuously

    @property
    def calls(self) -> int:
        """Number of calls to servers: one for each prompt."""
        return 1

    async def begin(self) -> list[pb.StreamGenerateRequest]:
        """Returns the request to the servers for each prompt. Raises grpc.RpcError."""
        self.model, self.fingerprint = await self._served.model(self.asked.model, self._metadata)
        group = self.asked.stream_interval or 1 if self.asked.stream else GROUP
        options = pb.StreamOptions(min_tokens_per_message=group)
        return [pb.StreamGenerateRequest(spec=spec, stream_options=options) for spec in self._specs()]

    @abstractmethod
    def _specs(self) -> list[pb.GenerationSpec]:
        """Returns the spec of each prompt."""

    def heading(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of each object of this response."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    async def pieces_of(self, position: int, message: pb.StreamGenerateResponse) -> list[Piece]:
        """Returns the pieces of a message of the stream of the prompt at `position`. Raises grpc.RpcError."""
        if message.HasField("usage"):
            self._usages[position] = message.usage
        if message.HasField("prompt_info"):
            await self._begin(position, message.prompt_info)
        return [await self._piece(position, delta) for delta in message.deltas]

    async def _begin(self, position: int, prompt: pb.PromptInfo) -> None:
        """Records a server's facts about this prompt. A server that goes on for another sends them again."""
        if self._has_extras:
            self._prompts[position] = prompt
        if self.asked.prompt_logprobs is not None:
            made = self._prompt_logprobs[position] = list[Any]()
            async for part in in_turns(prompt.logprobs):
                texts = await self._served.texts(ids_in(part), self.asked.model, self.fingerprint, self._metadata)
                made += prompt_logprobs(part, self.asked.prompt_logprobs, texts)

    async def _piece(self, position: int, delta: pb.SequenceDelta) -> Piece:
        choice = position * self.asked.sequences + delta.index
        logprobs = await self._logprobs(choice, delta.logprobs) if delta.logprobs else None
        extra = None
        if self._has_extras:
            extra = self._extra(self._prompts[position], choice, delta.token_ids, delta.token_count)
        if not delta.finish_reason:
            return Piece(choice, delta.text, logprobs, extra=extra)
        return Piece(choice, delta.text, logprobs, self._finish(choice, delta), self._stop(delta), extra)

    def _finish(self, choice: int, delta: pb.SequenceDelta) -> str:
        """Returns OpenAI's finish reason of a choice that ends."""
        del choice
        return FINISH_REASONS[delta.finish_reason]

    def _extra(self, prompt: pb.PromptInfo, choice: int, token_ids: Sequence[int], count: int) -> Extra | None:
        """Returns vLLM's optional fields of a piece with `count` new tokens; None if the client wants none."""
        if not self._has_extras:
            return None
        is_first, before = choice not in self._counts, self._counts.get(choice, 0)
        self._counts[choice] = before + count
        counts = (prompt.token_count, before + count) if self.asked.counts_continuously else None
        if not self.asked.return_token_ids:
            return Extra(None, None, counts)
        return Extra(list(token_ids), list(prompt.token_ids) if is_first else None, counts)

    @abstractmethod
    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> Any:
        """Returns logprobs of some tokens in the endpoint's form. Raises grpc.RpcError."""

    async def _texts(self, ids: Iterable[int]) -> dict[int, str]:
        if self.asked.return_tokens_as_token_ids:
            return {token: f"token_id:{token}" for token in ids}
        return await self._served.texts(ids, self.asked.model, self.fingerprint, self._metadata)

    def _stop(self, delta: pb.SequenceDelta) -> str | int | None:
        if delta.finish_reason in CUT_SHORT:
            return CUT_SHORT[delta.finish_reason]
        cause = delta.WhichOneof("stop_cause")
        if cause == "stop_string":
            return str(delta.stop_string)
        return int(delta.stop_token_id) if cause and delta.stop_token_id in self._stop_ids else None

    def usage(self) -> dict[str, Any]:
        """Returns token counts over all prompts."""
        usages = self._usages.values()
        prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_prompt_tokens for u in usages)},
            "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
        }

    def body(self, pieces: Iterable[Piece]) -> Work[bytes]:
        """Returns paced work that makes the whole response's body."""
        return answer_as_json(self.whole(pieces))

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Returns the whole response of all pieces."""
        choices: dict[int, list[Piece]] = {}
        for piece in pieces:
            choices.setdefault(piece.choice, []).append(piece)
        made = [
            self._choice(parts) | _end(number, parts[-1]) | self._more(number, parts)
            for number, parts in sorted(choices.items())
        ]
        beside = {} if self.prompt_in_choices else self._about_prompt(0, choices[0])
        return self.heading(self.kind) | {"choices": made, "usage": self.usage()} | beside

    def _more(self, number: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns vLLM's fields of a choice."""
        about = self._about_prompt(number // self.asked.sequences, pieces) if self.prompt_in_choices else {}
        if not self.asked.return_token_ids:
            return about
        return about | {"token_ids": [token for p in pieces if p.extra for token in p.extra.token_ids or ()]}

    def _about_prompt(self, position: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self.asked.return_token_ids and pieces[0].extra:
            about["prompt_token_ids"] = pieces[0].extra.prompt_ids
        if self.asked.prompt_logprobs is not None:
            about["prompt_logprobs"] = self._prompt_logprobs[position]
        return about

    @abstractmethod
    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the endpoint's own fields of a choice."""


def _end(number: int, last: Piece) -> dict[str, Any]:
    return {"index": number, "finish_reason": last.finish, "stop_reason": last.stop}
