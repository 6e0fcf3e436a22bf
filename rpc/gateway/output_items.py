"""The items of a response, made of pieces of a chat: reasoning, a message, function calls; and their events."""

import secrets
from collections.abc import Iterator
from typing import Any

from rpc.gateway.answers import Piece

Event = tuple[str, dict[str, Any]]
"""Type of an event without "response.", and its fields."""


class OutputItems:
    """Takes pieces, and gives out events.

    Attributes:
        done: Items that are whole, and at the end all.
        finish: OpenAI's finish reason of the chat; None before the end.
        stop: Its `stop_reason`.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop: str | int | None = None
        self._open: dict[str, Any] | None = None

    def add(self, piece: Piece) -> Iterator[Event]:
        """Adds a piece, and yields its events."""
        calls = list(piece.calls)
        if calls and "id" not in calls[0]:  # the end of a call, which came before the rest
            yield from self._arguments(calls.pop(0)["function"]["arguments"])
        if piece.reasoning:
            yield from self._begin("reasoning")
            yield from self._text("reasoning_text", piece.reasoning)
        if piece.text:
            yield from self._begin("message")
            yield from self._text("output_text", piece.text)
        for call in calls:
            yield from self._begin_call(call)
            yield from self._arguments(call["function"]["arguments"])
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
            yield from self._end("completed" if piece.finish in ("stop", "tool_calls") else "incomplete")

    def _begin(self, kind: str) -> Iterator[Event]:
        """Begins an item of texts, unless one of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end("completed")
        if kind == "reasoning":
            item: dict[str, Any] = {
                "id": _id("rs"),
                "type": kind,
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
        else:
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
        self._open = item
        yield "output_item.added", {"output_index": len(self.done), "item": _copy(item)}
        item["content"].append(_part(kind, ""))
        if kind == "message":
            yield "content_part.added", {**self._where(item), "part": _part(kind, "")}

    def _text(self, event: str, text: str) -> Iterator[Event]:
        item = self._open
        if item is not None:
            item["content"][0]["text"] += text
            logprobs: dict[str, Any] = {"logprobs": []} if event == "output_text" else {}
            yield f"{event}.delta", {**self._where(item), "delta": text, **logprobs}

    def _begin_call(self, call: dict[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = {
            "id": _id("fc"), "type": "function_call", "call_id": call["id"], "name": call["function"]["name"],
            "arguments": "", "status": "in_progress",
        }  # fmt: skip
        yield "output_item.added", {"output_index": len(self.done), "item": _copy(self._open)}

    def _arguments(self, text: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == "function_call" and text:
            self._open["arguments"] += text
            where = {"item_id": self._open["id"], "output_index": len(self.done)}
            yield "function_call_arguments.delta", {**where, "delta": text}

    def _end(self, status: str) -> Iterator[Event]:
        """Ends the open item."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        where = {"item_id": item["id"], "output_index": len(self.done)}
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "function_call_arguments.done", {**where, **named}
        else:
            (part,) = item["content"]
            if item["type"] == "message":
                yield "output_text.done", {**where, "content_index": 0, "text": part["text"], "logprobs": []}
                yield "content_part.done", {**where, "content_index": 0, "part": dict(part)}
            else:
                yield "reasoning_text.done", {**where, "content_index": 0, "text": part["text"]}
        yield "output_item.done", {"output_index": len(self.done), "item": _copy(item)}
        self.done.append(item)

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.done), "content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as it is now: its texts go on."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
