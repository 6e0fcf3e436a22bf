"""Renders conversations to prompts: the parent's side of `model.inputs.chat_process`."""

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from model.errors import CheckpointError
from model.inputs.chat import ChatTemplate
from model.inputs.line_process import LineProcess

START_SECONDS, RENDER_SECONDS = 5.0, 1.0  # processor time to compile the template, and to render a conversation
MEMORY = 256 * 2**20  # bytes of address space; 25 MiB are taken at the start


class ChatFailed(Exception):
    """The template gives no text for a conversation. Says why.

    Attributes:
        reason: Cause in UPPER_SNAKE, for programs.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChatRenderer:
    """One template and its process, which renders one conversation at a time and is restarted after its end.

    Safe to use from several threads. The process ends with this one in any case: its input ends, and its time limit
    ends a template that still runs.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Starts the process and compiles the template.

        Raises:
            CheckpointError: The template cannot be compiled.
            OSError: The process cannot be started.
        """
        self._template = template
        self._lock = threading.Lock()  # held from a request to its answer: the process reads one line at a time
        self._process: LineProcess | None = None
        self._closed = False
        with self._lock:
            self._start()

    @property
    def source(self) -> str:
        """The template in Jinja."""
        return self._template.source

    @property
    def beginning(self) -> str | None:
        """Token that begins a text, where the tokenizer's config names one."""
        return self._template.tokens.get("bos_token")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        arguments: Mapping[str, object],
        most: int,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt that asks for the next message.

        Args:
            messages: The conversation, as the template reads it.
            arguments: Arguments of the template, as JSON values.
            most: Characters that the prompt may have.
            tools: Functions that the model may call, as the template reads them.
            add_generation_prompt: Value of the template's variable of this name.
            continue_final_message: The prompt ends with the text of the last message, which has some.

        Raises:
            ChatFailed: The template gives no text.
            RuntimeError: The renderer is closed.
        """
        request = {
            "messages": messages,
            "arguments": arguments,
            "most": most,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            line = json.dumps(request)
        except RecursionError:
            raise ChatFailed(
                "CHAT_ERROR", "the arguments of the chat template, or tools, are too deeply nested"
            ) from None
        with self._lock:
            used = self._process is not None
            try:
                answer, code = self._ask(line, most)
                # A used process may have been killed, or damaged by an earlier conversation: a new one gets one try.
                if answer is None and used and code != -signal.SIGPROF:
                    answer, code = self._ask(line, most)
            except BaseException:  # as KeyboardInterrupt: the answer to this line must not be taken for the next one's
                self._end()
                raise
        if answer is None:
            raise _ended(code, RENDER_SECONDS)
        if "text" in answer:
            text: str = answer["text"]
            return text
        raise _failed(answer, most)

    def _ask(self, line: str, most: int) -> tuple[dict[str, Any] | None, int]:
        """Asks the process. Returns the answer, or None and the exit code of the process, which has ended then."""
        process = self._process or self._start()
        answer = process.ask(line, 12 * most + 2**16)  # a character is at most \uXXXX\uXXXX
        if answer is None or answer.get("failed") == "memory":  # the process's state is not trusted any more
            return answer, self._end()
        return answer, 0

    def _start(self) -> LineProcess:
        if self._closed:
            raise RuntimeError("this renderer is closed")
        process = self._process = LineProcess("model.inputs.chat_process")
        first = {
            "source": self._template.source,
            "tokens": self._template.tokens,
            "memory": MEMORY,
            "start_seconds": START_SECONDS,
            "render_seconds": RENDER_SECONDS,
        }
        answer = process.ask(json.dumps(first), 2**16)
        if answer is None or answer:
            code = self._end()
            error = _failed(answer, 0) if answer else _ended(code, START_SECONDS)
            raise CheckpointError(f"{self._template.path}: {error}")
        return process

    def _end(self) -> int:
        """Ends the process and returns its exit code."""
        process, self._process = self._process, None
        return 0 if process is None else process.end()

    def close(self) -> None:
        """Ends the process; a thread that waits for it gets an error. A second call does nothing."""
        self._closed = True
        # Killed without the lock: a thread that renders holds it until the process answers or ends.
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()


def _failed(answer: dict[str, Any], most: int) -> ChatFailed:
    """Makes the error for an answer without text; `most` is the limit of characters."""
    match answer["failed"]:
        case "refused":
            return _failure("CHAT_REFUSED", f"says: {answer['message']}")
        case "memory":
            return _failure("CHAT_LIMIT", f"needs more than {MEMORY >> 20} MiB")
        case "length":
            return _failure("CHAT_LIMIT", f"makes more than {most} characters of this")
        case _:
            return _failure("CHAT_ERROR", f"fails: {answer['message']}")


def _ended(code: int, seconds: float) -> ChatFailed:
    """Makes the error for a process that ended without an answer.

    Args:
        code: Its exit code.
        seconds: Processor time that it had.
    """
    if code == -signal.SIGPROF:
        return _failure("CHAT_LIMIT", f"computes for more than {seconds:g} s")
    return _failure("CHAT_ERROR", f"has ended its process (code {code}) or hung")


def _failure(reason: str, what: str) -> ChatFailed:
    return ChatFailed(reason, f"the model's chat template {what}")
