"""Writes docs/reference/api.md from the comments in proto/quire/v1: `make api-docs`.

python docs/make_api.py DESCRIPTOR_SET > docs/reference/api.md
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PACKAGE = "quire.v1"
INTRODUCTION = """# API reference

Generated from [`proto/quire/v1`](../../proto/quire/v1) by `make api-docs`.
"""
MESSAGE, ENUM, SERVICE, FIELD, VALUE, METHOD = 4, 5, 6, 2, 2, 2  # numbers of fields, in descriptor.proto's paths
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


class ApiDocument:
    """The reference of one .proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(one.path): " ".join(one.leading_comments.split()) for one in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        for i, service in enumerate(self._file.service):
            yield from self._service(service, (SERVICE, i))
        for i, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGE, i))
        for i, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUM, i))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from (f"## {service.name}", "", self._comments[path], "")
        yield from ("| rpc | takes | gives | what it does |", "|---|---|---|---|")
        for i, method in enumerate(service.method):
            stream = "stream of " if method.server_streaming else ""
            takes, gives = linked(method.input_type), stream + linked(method.output_type)
            yield f"| `{method.name}` | {takes} | {gives} | {self._comments[(*path, METHOD, i)]} |"
        yield ""

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from (f"### {message.name}", "", self._comments[path], "")
        if not message.field:
            return
        yield from ("| field | type | what it is |", "|---|---|---|")
        for i, field in enumerate(message.field):
            one_of = field.HasField("oneof_index") and not field.proto3_optional
            note = f"One of `{message.oneof_decl[field.oneof_index].name}`. " if one_of else ""
            yield f"| `{field.name}` | {type_of(field, message)} | {note}{self._comments[(*path, FIELD, i)]} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from (
            f"### {enum.name}",
            "",
            self._comments[path],
            "",
            "| value | number | what it is |",
            "|---|---|---|",
        )
        for i, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {self._comments[(*path, VALUE, i)]} |"
        yield ""


def type_of(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entries = {f".{PACKAGE}.{message.name}.{one.name}": one for one in message.nested_type if one.options.map_entry}
    if field.type_name in entries:
        key, value = (type_of(one, message) for one in entries[field.type_name].field)
        return f"map of {key} to {value}"
    name = linked(field.type_name) if field.type_name else f"`{SCALARS[field.type]}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def linked(name: str) -> str:
    """Returns a type's name, with a link to its section."""
    package, _, short = name.removeprefix(".").rpartition(".")
    return f"[{short}](#{short.lower()})" if package == PACKAGE else f"`{package}.{short}`"


def page(files: Sequence[FileDescriptorProto]) -> str:
    ours = [file for file in files if file.package == PACKAGE]
    parts = ["\n".join(ApiDocument(file).lines()) for file in sorted(ours, key=lambda file: file.name)]
    return "\n".join([INTRODUCTION, *parts]).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes()).file))
