"""An answer of either endpoint: what servers' messages bring for each of its choices, and the counts of tokens."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.client.security import Metadata
from rpc.gateway.schema import Asked
from rpc.gateway.served import Served

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",
    pb.FINISH_REASON_ABORTED: "length",
}
CUT_SHORT = {pb.FINISH_REASON_DEADLINE: "deadline", pb.FINISH_REASON_ABORTED: "abort"}
"""What OpenAI has no words for: whoever knows its reasons sees that the text is not all, `stop_reason` says why."""
GROUP = 64  # tokens of a message where nobody reads them as they come


@dataclass(frozen=True, slots=True)
class Piece:
    """What came for a choice. logprobs: in the endpoint's form. stop: as vLLM has it, the stop string or the stop token
    that was asked for and ended it, or what cut it short.
    """

    choice: int
    text: str
    logprobs: Any = None
    finish: str | None = None
    stop: str | int | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.logprobs or self.finish)


class Answer(ABC):
    """Choices are counted over all prompts: those of a prompt stand together. kind, chunk_kind: of its objects, whole
    and in parts. part: what a part's text is in, before and after.
    """

    kind: str
    chunk_kind: str
    prefix: str
    part: tuple[bytes, bytes]

    def __init__(self, asked: Asked, served: Served, metadata: Metadata) -> None:
        self.asked, self._served, self._metadata = asked, served, metadata
        self.model = asked.model or ""
        self.fingerprint: str | None = None
        self._id, self._created = self.prefix + secrets.token_hex(12), int(time.time())
        self._stop_ids = frozenset(asked.stop_token_ids or ())
        self._usages: dict[int, pb.Usage] = {}

    @property
    def calls(self) -> int:
        """That it takes: one for each prompt."""
        return 1

    async def begin(self) -> list[pb.StreamGenerateRequest]:
        """What the servers are asked, for each prompt. Raises grpc.RpcError."""
        self.model, self.fingerprint = await self._served.model(self.asked.model, self._metadata)
        group = 1 if self.asked.stream else GROUP
        options = pb.StreamOptions(min_tokens_per_message=group)
        return [pb.StreamGenerateRequest(spec=spec, stream_options=options) for spec in await self._specs()]

    @abstractmethod
    async def _specs(self) -> list[pb.GenerationSpec]:
        """Of each prompt. Raises grpc.RpcError."""

    def heading(self, kind: str) -> dict[str, Any]:
        """What each object of this answer begins with."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    async def take(self, position: int, message: pb.StreamGenerateResponse) -> list[Piece]:
        """What a message of this prompt's stream brings. Raises grpc.RpcError."""
        if message.HasField("usage"):
            self._usages[position] = message.usage
        return [await self._piece(position, delta) for delta in message.deltas]

    async def _piece(self, position: int, delta: pb.SequenceDelta) -> Piece:
        choice = position * self.asked.sequences + delta.index
        logprobs = await self._logprobs(choice, delta.logprobs) if delta.logprobs else None
        if not delta.finish_reason:
            return Piece(choice, delta.text, logprobs)
        return Piece(choice, delta.text, logprobs, FINISH_REASONS[delta.finish_reason], self._stop(delta))

    @abstractmethod
    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> Any:
        """Of some tokens, in the endpoint's form. Raises grpc.RpcError."""

    async def _texts(self, ids: Iterable[int]) -> dict[int, str]:
        return await self._served.texts(ids, self.asked.model, self.fingerprint, self._metadata)

    def _stop(self, delta: pb.SequenceDelta) -> str | int | None:
        if delta.finish_reason in CUT_SHORT:
            return CUT_SHORT[delta.finish_reason]
        cause = delta.WhichOneof("stop_cause")
        if cause == "stop_string":
            return str(delta.stop_string)
        return int(delta.stop_token_id) if cause and delta.stop_token_id in self._stop_ids else None

    def usage(self) -> dict[str, Any]:
        """Of all prompts together."""
        usages = self._usages.values()
        prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_prompt_tokens for u in usages)},
        }

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The answer that all pieces make."""
        choices: dict[int, list[Piece]] = {}
        for piece in pieces:
            choices.setdefault(piece.choice, []).append(piece)
        made = [self._choice(parts) | _end(number, parts[-1]) for number, parts in sorted(choices.items())]
        return self.heading(self.kind) | {"choices": made, "usage": self.usage()}

    @abstractmethod
    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What is this endpoint's own in a choice."""


def _end(number: int, last: Piece) -> dict[str, Any]:
    return {"index": number, "finish_reason": last.finish, "stop_reason": last.stop}
