from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("version", "secret", "model", "engines")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    version: int
    secret: bytes
    model: bytes
    engines: _containers.RepeatedCompositeFieldContainer[TableEntry]
    def __init__(self, version: _Optional[int] = ..., secret: _Optional[bytes] = ..., model: _Optional[bytes] = ..., engines: _Optional[_Iterable[_Union[TableEntry, _Mapping]]] = ...) -> None: ...

class TableEntry(_message.Message):
    __slots__ = ("number", "epoch", "address", "token", "place", "drained", "leaving")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    address: str
    token: str
    place: str
    drained: bool
    leaving: bool
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., token: _Optional[str] = ..., place: _Optional[str] = ..., drained: _Optional[bool] = ..., leaving: _Optional[bool] = ...) -> None: ...
