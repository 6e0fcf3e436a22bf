"""Responses of POST /v1/responses."""

from collections.abc import Iterable, Iterator
from typing import Any

from rpc.client.security import Metadata
from rpc.frontend.pacing import Work
from rpc.gateway.answers import Piece
from rpc.gateway.chat import ChatResponse
from rpc.gateway.errors import ApiError
from rpc.gateway.logprobs import as_json
from rpc.gateway.output_items import Event, OutputItems
from rpc.gateway.responses_schema import FUNCTION_FIELDS, ResponsesChat
from rpc.gateway.served import ServedModels

ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key")
MOST_TOKENS = "max_output_tokens"
CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""HTTP status of a failure, to the code of a failed response, of which OpenAI's clients know a fixed set."""


class ModelResponse(ChatResponse):
    """A response: a chat, in OpenAI's newer form."""

    prefix = "resp_"
    asked: ResponsesChat

    def __init__(self, asked: ResponsesChat, served: ServedModels, metadata: Metadata) -> None:
        super().__init__(asked, served, metadata)
        self.items = OutputItems()

    def whole(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        for piece in pieces:
            for _ in self.items.add(piece):
                pass
        return self.state()

    def body(self, pieces: Iterable[Piece]) -> Work[bytes]:
        yield
        return as_json(self.whole(pieces))

    def state(self, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response as it is now. error: why it has failed."""
        asked, finish = self.asked.asked, self.items.finish
        incomplete = finish is not None and finish not in ("stop", "tool_calls")
        status = "failed" if error else "in_progress" if finish is None else "incomplete" if incomplete else "completed"
        text = asked.text.format if asked.text is not None else None
        choice = asked.tool_choice
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            # Clients know no word for an end by time or by an operator; as in chats, `stop_reason` says which it was.
            "incomplete_details": {"reason": MOST_TOKENS, "stop_reason": self.items.stop} if incomplete else None,
            "model": self.model,
            "output": list(self.items.done),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(include=FUNCTION_FIELDS) for tool in asked.tools or ()],
            "truncation": "disabled",
            "usage": None if finish is None else self._usage(),
            "metadata": asked.metadata or {},
        } | {name: getattr(asked, name) for name in ECHOED}

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            # Nothing is paid for writing to the cache, so no token counts as written.
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }


class ResponseEvents:
    """Encodes the events of a response."""

    def __init__(self, response: ModelResponse) -> None:
        self._response, self._items = response, response.items
        self._number = 0

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        """Returns the events of some pieces."""
        return b"".join(map(self._event, self._of(pieces)))

    def _of(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        if not self._number:
            yield "created", {"response": self._response.state()}
            yield "in_progress", {"response": self._response.state()}
        for piece in pieces:
            yield from self._items.add(piece)

    def end(self) -> bytes:
        """Returns the last event."""
        state = self._response.state()
        return self._event((state["status"], {"response": state}))

    def failed(self, error: ApiError) -> bytes:
        """Returns the event of a failure that came after the first one."""
        code = CODES.get(error.status, "server_error")
        said = {"code": code, "message": error.message, "param": error.param, "type": error.code or error.kind}
        return self._event(("failed", {"response": self._response.state(said)}))

    def _event(self, event: Event) -> bytes:
        kind, fields = event
        name, number = f"response.{kind}", self._number
        self._number += 1
        data = as_json({"type": name, "sequence_number": number, **fields})
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
