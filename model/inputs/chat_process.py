"""Runs a chat template in a process with limits, since a template is an untrusted program.

Each line of JSON on standard input is answered by a line on standard output.

The first line has `source` and `tokens` of a `ChatTemplate` and the limits. `memory` is bytes of address space.
`start_seconds` and `render_seconds` are processor time to compile the template and for each conversation. Its answer is
{} once the template is compiled.

Each other line has `messages`, `tools`, `arguments` of the template, `most` (the characters that the text may have),
`add_generation_prompt` and `continue_final_message`. Its answer has `text`. Without a text, `failed` says why (refused,
error, memory, length) and `message` gives details.

A template that computes for too long ends the process with SIGPROF. The end of the input ends it as well. Imports
little, so that it starts soon. Templates see the names that transformers 5 gives them.
"""

import json
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from model.inputs.process_limits import limit_memory

MESSAGE = 500  # characters
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own; marks the end of the text that the model continues


class TemplateRefused(jinja2.TemplateError):
    """The template called raise_exception."""


class TooLong(Exception):
    """The text has more characters than it may have."""


class CutOff(Exception):
    """The template leaves out text that the model is to continue."""


class Generation(Extension):
    """Renders {% generation %}, which marks what a model is trained on, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's name and type

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> Any:
        return caller()


class PlainDict:
    """`dict` for templates, without the other attributes of a type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(Namespace):
    """`namespace` for templates, without names that begin with _."""

    def __init__(*args: Any, **values: Any) -> None:  # like jinja2's: namespace(self=...) is an ordinary name
        self, given = args[0], dict(*args[1:], **values)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}: it begins with _")


def raise_exception(message: object) -> None:
    raise TemplateRefused(str(message)[:MESSAGE])


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats JSON; unlike jinja2's own it leaves <, >, & and ' unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers


def compiled(source: str) -> jinja2.Template:
    """Compiles a template in a sandbox. Raises jinja2's errors."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment.from_string(source)


def rendered(template: jinja2.Template, tokens: dict[str, str], request: dict[str, Any]) -> str:
    """Renders a conversation.

    Raises:
        TemplateRefused: The template called raise_exception.
        TooLong: The text is too long.
        CutOff: Text to continue is missing. A template can raise any other error too.
    """
    if not request["continue_final_message"]:
        return _generated(template, tokens, request)
    final = _mark_end(request["messages"][-1])
    text = _generated(template, tokens, request)
    mark = END_MARK.strip()
    if final.strip() not in text or mark not in text:
        raise CutOff("it leaves out text of the last message, which the model is to continue")
    text, _, behind = text.rpartition(mark)
    return text if behind.startswith(" ") else text.rstrip()  # a template that trims content trims what is continued


def _mark_end(message: dict[str, Any]) -> str:
    """Appends END_MARK to the last text of a message. Returns that text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + END_MARK
        return content
    part: dict[str, str] = next(part for part in reversed(content) if "text" in part)
    text = part["text"]
    part["text"] += END_MARK
    return text


def _generated(template: jinja2.Template, tokens: dict[str, str], request: dict[str, Any]) -> str:
    given = {
        "messages": request["messages"],
        "tools": request["tools"],
        "documents": None,
        "add_generation_prompt": request["add_generation_prompt"],
    }
    parts, size = [], 0
    for part in template.generate(**(tokens | request["arguments"] | given)):
        size += len(part)
        if size > request["most"]:
            raise TooLong
        parts.append(part)
    return "".join(parts)


def failure_of(error: Exception) -> dict[str, str]:
    """Returns the answer for an exception."""
    if isinstance(error, TemplateRefused):
        return {"failed": "refused", "message": str(error)}
    if isinstance(error, TooLong):
        return {"failed": "length", "message": ""}
    if isinstance(error, MemoryError):
        return {"failed": "memory", "message": ""}
    if isinstance(error, jinja2.TemplateSyntaxError):
        return {"failed": "error", "message": f"line {error.lineno}: {error.message}"[:MESSAGE]}
    if isinstance(error, CutOff):
        return {"failed": "error", "message": str(error)}
    return {"failed": "error", "message": f"{type(error).__name__}: {error}"[:MESSAGE]}


def limit_time(seconds: float) -> None:
    """Limits processor time from now on, in seconds; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(values: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they ask the server to stop, which drains first
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if not (line := sys.stdin.readline()):
        return  # the parent has ended
    first = json.loads(line)
    limit_memory(first["memory"])
    limit_time(first["start_seconds"])
    try:
        template = compiled(first["source"])
    except Exception as error:
        answer(failure_of(error))
        return
    answer({})
    limit_time(0)
    while line := sys.stdin.readline():
        limit_time(first["render_seconds"])
        try:
            answer({"text": rendered(template, first["tokens"], json.loads(line))})
        except Exception as error:
            answer(failure_of(error))
        limit_time(0)


if __name__ == "__main__":
    main()
