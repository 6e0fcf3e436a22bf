import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_PREPARING: _ClassVar[RequestState]
    REQUEST_STATE_PARKED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]

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
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_PREPARING: RequestState
REQUEST_STATE_PARKED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_RUNNING: RequestState
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

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "architecture", "dtype", "device", "max_model_length", "page_size", "max_sequences")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    architecture: str
    dtype: str
    device: str
    max_model_length: int
    page_size: int
    max_sequences: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., max_model_length: _Optional[int] = ..., page_size: _Optional[int] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("uptime", "replicas", "request_count", "tenants", "prompt_tokens_total", "cached_prompt_tokens_total", "generation_tokens_total", "first_tokens_total", "first_token_time_total", "ended_requests_total")
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIME_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENDED_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    uptime: _duration_pb2.Duration
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    request_count: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    first_tokens_total: int
    first_token_time_total: _duration_pb2.Duration
    ended_requests_total: int
    def __init__(self, uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., request_count: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., prompt_tokens_total: _Optional[int] = ..., cached_prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., first_tokens_total: _Optional[int] = ..., first_token_time_total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ended_requests_total: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("tenant", "request_count", "waiting_count", "tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_count: int
    waiting_count: int
    tokens: int
    def __init__(self, tenant: _Optional[str] = ..., request_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("max_count",)
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_count: int
    def __init__(self, max_count: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total_count")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    total_count: int
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., total_count: _Optional[int] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "state", "age", "prompt_tokens", "completion_tokens", "replica")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    state: RequestState
    age: _duration_pb2.Duration
    prompt_tokens: int
    completion_tokens: int
    replica: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
