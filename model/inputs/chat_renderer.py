"""Conversations to prompts: the near side of `model.inputs.chat_process`."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from model.errors import CheckpointError
from model.inputs.chat import ChatTemplate

START_SECONDS, RENDER_SECONDS = 5.0, 1.0  # of processor time: to compile the template, and for a conversation
MEMORY = 256 * 2**20  # bytes of address space; 25 MiB are taken at the start
WAIT = 10.0  # seconds for an answer, also where the process gets no processor


class ChatFailed(Exception):
    """A conversation that the template gives no text for; says why. reason: UPPER_SNAKE, for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChatRenderer:
    """One template and its process, which renders a conversation at a time and is started anew where it has ended.

    For several threads. The process ends with this one, whatever happens: its input ends, and a template that runs
    then is ended by its limit.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Compiles the template. Raises CheckpointError where that cannot be done, OSError."""
        self._template = template
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        with self._lock:
            self._start()

    @property
    def beginning(self) -> str | None:
        """The token that begins a text, where the tokenizer's config names one."""
        return self._template.tokens.get("bos_token")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        arguments: Mapping[str, object],
        most: int,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt that asks for the next message.

        Args:
            messages: The conversation, as the template reads it.
            arguments: Of the template, as JSON can say them.
            most: Characters that the prompt may have.
            add_generation_prompt: What the template is told under this name.
            continue_final_message: The prompt ends with the text of the last message, which has some.

        Raises:
            ChatFailed: The template gives no text.
            RuntimeError: After `close`.
        """
        request = {
            "messages": messages,
            "arguments": arguments,
            "most": most,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            line = json.dumps(request)
        except RecursionError:
            raise ChatFailed("CHAT_ERROR", "the arguments of the chat template are nested too deeply") from None
        with self._lock:
            used = self._process is not None
            try:
                answer, code = self._ask(line, most)
                if answer is None and used and code != -signal.SIGPROF:  # it was killed, or hurt by what it did before
                    answer, code = self._ask(line, most)
            except BaseException:  # as KeyboardInterrupt: an answer that still comes is nobody's
                self._end()
                raise
        if answer is None:
            raise _ended(code, RENDER_SECONDS)
        if "text" in answer:
            text: str = answer["text"]
            return text
        raise _failed(answer, most)

    def _ask(self, line: str, most: int) -> tuple[dict[str, Any] | None, int]:
        """The answer, or None and what the process, which is gone then, ended with."""
        process = self._process or self._start()
        answer = _exchange(process, line, 12 * most + 2**16)  # a character is at most \uXXXX\uXXXX
        if answer is None or answer.get("failed") == "memory":  # which may have left anything half done
            return answer, self._end()
        return answer, 0

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RuntimeError("this renderer is closed")
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "model.inputs.chat_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},  # a locale's archive would take of its address space
        )
        first = {
            "source": self._template.source,
            "tokens": self._template.tokens,
            "memory": MEMORY,
            "start_seconds": START_SECONDS,
            "render_seconds": RENDER_SECONDS,
        }
        answer = _exchange(process, json.dumps(first), 2**16)
        if answer is None or answer:
            code = self._end()
            error = _failed(answer, 0) if answer else _ended(code, START_SECONDS)
            raise CheckpointError(f"{self._template.path}: {error}")
        return process

    def _end(self) -> int:
        """Ends the process; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not sent has no reader
                pipe.close()  # type: ignore[union-attr]
        return process.wait()

    def close(self) -> None:
        """Ends the process; a thread that waits for it gets an error. A second call does nothing."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()


def _exchange(process: subprocess.Popen[bytes], line: str, most: int) -> dict[str, Any] | None:
    """A line to the process and its answer of at most so many bytes; None where there comes none."""
    timer = threading.Timer(WAIT, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        answer = process.stdout.readline(most)  # type: ignore[union-attr]
    except OSError:
        answer = b""
    finally:
        timer.cancel()
    return json.loads(answer) if answer.endswith(b"\n") else None


def _failed(answer: dict[str, Any], most: int) -> ChatFailed:
    """What an answer without text says. most: characters that were allowed."""
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
    """code: of a process that ended without an answer. seconds: of processor time that it had."""
    if code == -signal.SIGPROF:
        return _failure("CHAT_LIMIT", f"computes for more than {seconds:g} s")
    return _failure("CHAT_ERROR", f"has ended its process (code {code}) or hung")


def _failure(reason: str, what: str) -> ChatFailed:
    return ChatFailed(reason, f"the model's chat template {what}")
