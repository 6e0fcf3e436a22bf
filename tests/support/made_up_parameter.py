"""A program with one request parameter more: `made_up`, a number in [0, 5]. It prints what each way in makes of it.

The parameter is four lines, which the program adds to the code before it imports it: EDITS and FIELDS. No other file is
changed, so a way in that takes the parameter is driven by the table of parameters.
"""

import json
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

EDITS = {
    "scheduler.parameters": (
        "    seed: int | None =",
        '    made_up: float | None = parameter(None, within=Interval(0, 5), note="0 is off", neutral=0.0, '
        'control="made_up", flag="--made-up", meaning="Does nothing.")',
    ),
    "scheduler.controls": ("    prompt_logprobs: bool = False", "    made_up: float = -1.0"),  # -1: it is unset
}
"""By module, a line before which another one stands, and that other one."""
FIELDS = {
    "quire/v1/generation_service.proto": ("SamplingParameters", FieldDescriptorProto.TYPE_FLOAT, True),
    "quire/engine/v1/engine_service.proto": ("Controls", FieldDescriptorProto.TYPE_DOUBLE, False),
}
"""By proto file, a message that gets the field, the field's type, and whether it is optional."""


class Edited(SourceFileLoader):
    """Loads a module with its line more."""

    def get_code(self, fullname: str) -> CodeType:
        before, line = EDITS[fullname]
        source = self.get_source(fullname)
        assert source is not None
        assert source.count(before) == 1, f"{fullname} has no such line any more: {before}"
        return compile(source.replace(before, f"{line}\n{before}"), self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the modules of EDITS."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in EDITS else None
        if spec is not None:
            assert spec.origin is not None
            spec.loader = Edited(name, spec.origin)
        return spec


class Pool:
    """The pool of messages, whose files get their field more."""

    def __init__(self) -> None:
        self._pool = DEFAULT()

    def AddSerializedFile(self, data: bytes) -> Any:  # noqa: N802 - protobuf's name
        file = FileDescriptorProto.FromString(data)
        if file.name in FIELDS:
            name, kind, optional = FIELDS[file.name]
            (message,) = (one for one in file.message_type if one.name == name)
            field = message.field.add(name="made_up", number=999, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if optional:
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name="_made_up")
        return self._pool.AddSerializedFile(file.SerializeToString())


DEFAULT = descriptor_pool.Default
sys.meta_path.insert(0, Finder())
with mock.patch.object(descriptor_pool, "Default", Pool):
    from quire.engine.v1 import engine_service_pb2 as engine_pb  # noqa: F401
    from quire.v1 import generation_service_pb2 as pb

from quire import Beam, Sampling, Stopping  # noqa: E402

from docs.pages_of_code import parameters as reference_page  # noqa: E402
from rpc.batch.lines import parse_line  # noqa: E402
from rpc.batch.openai_lines import OpenAILine, parse_openai_line  # noqa: E402
from rpc.cli import chat, generate, parameters  # noqa: E402
from rpc.client.specs import spec_of  # noqa: E402
from rpc.frontend.errors import RequestFailed, invalid  # noqa: E402
from rpc.gateway.chat_schema import ChatRequest  # noqa: E402
from rpc.gateway.completion_schema import CompletionRequest  # noqa: E402
from rpc.gateway.errors import ApiError, in_words_of, translated  # noqa: E402
from rpc.gateway.parameters import chat_spec, completion_spec, names_of  # noqa: E402
from rpc.link import codec  # noqa: E402
from rpc.services import convert  # noqa: E402
from rpc.services.inference.asking import renamed  # noqa: E402
from rpc.services.inference.parameters import read_parameters  # noqa: E402
from rpc.terminal.conversation import Conversation  # noqa: E402
from rpc.web.prompts import spec_in  # noqa: E402
from scheduler.events import Submit  # noqa: E402
from scheduler.invalid import InvalidRequest  # noqa: E402
from scheduler.limits import Limits, ModelDefaults  # noqa: E402
from scheduler.request import Request  # noqa: E402
from scheduler.resolve import resolve  # noqa: E402
from scheduler.spec import Spec  # noqa: E402

LIMITS = Limits(vocabulary=100, context=64, pool_tokens=256, sequences=8)
OPTIONS = parameters.SamplingOptions, parameters.StoppingOptions


def request(sampling: Any) -> Request:
    return resolve(Spec((5, 6), sampling=sampling), [5, 6], LIMITS, ModelDefaults(), minted_seed=9)


def from_python(value: float) -> float:
    return Sampling(made_up=value).made_up


def from_message(value: float) -> float:
    return served(pb.GenerationSpec(text="A", sampling=pb.SamplingParameters(made_up=value)))


def from_client(value: float) -> float:
    return served(spec_of("A", made_up=value))


def from_completion(value: float) -> float:
    asked = CompletionRequest.model_validate({"prompt": "A", "made_up": value})
    return in_names_of(asked, lambda: served(completion_spec(asked, "A")))


def from_chat(value: float) -> float:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "A"}], "made_up": value})
    return in_names_of(asked, lambda: served(chat_spec(asked)))


def from_open_inference(value: float) -> float:
    try:
        return read_parameters({"made_up": str(value)}).sampling.made_up
    except InvalidRequest as error:
        raise renamed(invalid(error)) from None


def from_batch_line(value: float) -> float:
    line = parse_line(0, 1, json.dumps({"id": 1, "prompt": "A", "sampling": {"made_up": value}}).encode())
    assert line.request is not None
    return served(line.request.spec)


def from_openai_batch_line(value: float) -> float:
    body = {"prompt": "A", "made_up": value, "model": "m"}
    data = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    line = parse_openai_line(0, 1, json.dumps(data).encode())
    assert isinstance(line, OpenAILine)
    if isinstance(line.body, ApiError):
        raise ValueError(str(line.body))
    return served(completion_spec(line.body, "A"))


def from_flags(value: float) -> float:
    """As `quire generate` does: what its flags hold goes to the server."""
    for command in (generate.generate, chat.chat):
        assert "made_up" in command.__signature__.parameters
    given = parameters.SamplingOptions(made_up=value)
    return from_client(given.made_up)


def from_terminal(value: float) -> float:
    conversation = Conversation(False, OPTIONS, {"made_up": None})
    conversation.command(f"/set made_up {value}")
    return served(spec_of("A", **conversation.options))


def from_dashboard(value: float) -> float:
    """Its form has three fields of its own."""
    return served(spec_in(json.dumps({"prompt": "A", "made_up": value}).encode()))


def across_the_link(value: float) -> float:
    submit = Submit(1, request(Sampling(made_up=value)), ())
    (event,) = codec.decode_events(codec.encode_events([submit]))
    assert isinstance(event, Submit)
    return event.request.controls.made_up


def to_a_request(value: float) -> float:
    return request(Sampling(made_up=value)).controls.made_up


def where_nobody_asks(_: float) -> float:
    return request(Sampling()).controls.made_up


def in_a_search(value: float) -> float:
    return request(Sampling(made_up=value, beam=Beam(2))).controls.made_up


def in_the_wrong_class(value: float) -> float:
    Stopping(made_up=value)
    raise AssertionError


def on_the_page(_: float) -> float:
    (row,) = (row for row in reference_page.page().splitlines() if "made_up" in row)
    assert row == "| `sampling.made_up` | `made_up` | `--made-up` | number, in [0, 5] | 0.0 | Does nothing. |", row
    return 0.0


def served(spec: pb.GenerationSpec) -> float:
    """Returns the value that a server reads of a request."""
    return convert.spec_from(spec).sampling.made_up


def in_names_of(asked: Any, call: Callable[[], float]) -> float:
    """Says a refusal as the gateway does."""
    try:
        return call()
    except RequestFailed as failure:
        names = names_of(asked)
        raise ValueError(in_words_of(names, str(failure), failure.field, translated(failure.field, names))) from None


WAYS = (
    from_python, from_message, from_client, from_completion, from_chat, from_open_inference, from_batch_line,
    from_openai_batch_line, from_flags, from_terminal, from_dashboard, across_the_link, to_a_request, where_nobody_asks,
    in_a_search, in_the_wrong_class, on_the_page,
)  # fmt: skip


def outcome(way: Callable[[float], float], value: float) -> float | str:
    """Returns the value that arrives, or the text of a refusal."""
    try:
        return way(value)
    except (ValueError, TypeError, RequestFailed) as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps({way.__name__: [outcome(way, value) for value in (2.5, 9.0)] for way in WAYS}))
