"""Responses of POST /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.client.security import Metadata
from rpc.gateway.answers import ApiResponse, Piece
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.logprobs import chat_entries, ids_in
from rpc.gateway.parameters import chat_spec
from rpc.gateway.served import ServedModels


class ChatResponse(ApiResponse):
    """Response of a chat; the first chunk of each choice has the role."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"
    part = (b'"delta":{"content":', b"}")
    prompt_in_choices = False
    asked: ChatRequest

    def __init__(self, asked: ChatRequest, served: ServedModels, metadata: Metadata) -> None:
        super().__init__(asked, served, metadata)
        self._callers = set[int]()  # choices that have called tools

    def _specs(self) -> list[pb.GenerationSpec]:
        return [chat_spec(self.asked)]

    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | None:
        del choice
        if not self.asked.logprobs:  # only the prompt's are wanted
            return None
        texts = await self._texts(ids_in(positions))
        return {"content": chat_entries(positions, self.asked.top_logprobs or 0, texts), "refusal": None}

    async def _piece(self, position: int, delta: pb.SequenceDelta) -> Piece:
        self._callers.update({delta.index} if delta.tool_calls else ())
        piece = await super()._piece(position, delta)
        if not (delta.reasoning or delta.tool_calls):
            return piece
        reasoning = delta.reasoning if self.asked.shows_reasoning else ""
        return replace(piece, reasoning=reasoning, calls=tuple(map(_call_chunk, delta.tool_calls)))

    def _finish(self, choice: int, delta: pb.SequenceDelta) -> str:
        finish = super()._finish(choice, delta)
        return "tool_calls" if finish == "stop" and choice in self._callers else finish

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs["content"]]
        logprobs = {"content": entries, "refusal": None} if self.asked.logprobs else None
        calls = whole_calls(call for piece in pieces for call in piece.calls)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning := "".join(piece.reasoning for piece in pieces):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": logprobs}


def _call_chunk(call: pb.ToolCallDelta) -> dict[str, Any]:
    """Returns a part of a call as OpenAI's chunks have it: id, type and name in the first one alone."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def whole_calls(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the calls of all their parts."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if "id" in part or not calls:
            function = {"name": part["function"].get("name", ""), "arguments": ""}
            calls.append({"id": part.get("id", ""), "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls
