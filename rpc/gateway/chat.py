"""Responses of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.gateway.answers import ApiResponse, Piece
from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.logprobs import chat_entries, ids_in
from rpc.gateway.parameters import chat_spec


class ChatResponse(ApiResponse):
    """Response of a chat; the first chunk of each choice has the role."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl-"
    part = (b'"delta":{"content":', b"}")
    prompt_in_choices = False
    asked: ChatRequest

    def _specs(self) -> list[pb.GenerationSpec]:
        return [chat_spec(self.asked)]

    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | None:
        del choice
        if not self.asked.logprobs:  # only the prompt's are wanted
            return None
        texts = await self._texts(ids_in(positions))
        return {"content": chat_entries(positions, self.asked.top_logprobs or 0, texts), "refusal": None}

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs["content"]]
        logprobs = {"content": entries, "refusal": None} if self.asked.logprobs else None
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}
