from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINED: _ClassVar[ReplicaState]
    REPLICA_STATE_ISOLATED: _ClassVar[ReplicaState]

class PageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_STATE_UNSPECIFIED: _ClassVar[PageState]
    PAGE_STATE_FREE: _ClassVar[PageState]
    PAGE_STATE_HELD: _ClassVar[PageState]
    PAGE_STATE_CACHED: _ClassVar[PageState]
    PAGE_STATE_SET_ASIDE: _ClassVar[PageState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_DRAINED: ReplicaState
REPLICA_STATE_ISOLATED: ReplicaState
PAGE_STATE_UNSPECIFIED: PageState
PAGE_STATE_FREE: PageState
PAGE_STATE_HELD: PageState
PAGE_STATE_CACHED: PageState
PAGE_STATE_SET_ASIDE: PageState

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("number", "state", "epoch", "place", "running", "waiting", "waiting_tokens", "pages_used", "pages_total", "pages_cached", "request_count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: ReplicaState
    epoch: int
    place: str
    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    pages_cached: int
    request_count: int
    def __init__(self, number: _Optional[int] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., epoch: _Optional[int] = ..., place: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_cached: _Optional[int] = ..., request_count: _Optional[int] = ...) -> None: ...

class DrainReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class DrainReplicaResponse(_message.Message):
    __slots__ = ("moved_count",)
    MOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    moved_count: int
    def __init__(self, moved_count: _Optional[int] = ...) -> None: ...

class ResumeReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class ResumeReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestartReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class RestartReplicaResponse(_message.Message):
    __slots__ = ("moved_count",)
    MOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    moved_count: int
    def __init__(self, moved_count: _Optional[int] = ...) -> None: ...

class GetPageMapRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class GetPageMapResponse(_message.Message):
    __slots__ = ("page_size", "states", "holder_counts", "holders")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_COUNTS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    states: _containers.RepeatedScalarFieldContainer[PageState]
    holder_counts: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedCompositeFieldContainer[PageHolder]
    def __init__(self, page_size: _Optional[int] = ..., states: _Optional[_Iterable[_Union[PageState, str]]] = ..., holder_counts: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[_Union[PageHolder, _Mapping]]] = ...) -> None: ...

class PageHolder(_message.Message):
    __slots__ = ("request_id", "step", "pages")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    step: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., step: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("page_count",)
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    page_count: int
    def __init__(self, page_count: _Optional[int] = ...) -> None: ...
