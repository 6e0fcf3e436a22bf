from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP: _ClassVar[EndReason]
    END_REASON_LENGTH: _ClassVar[EndReason]
    END_REASON_FINISHED: _ClassVar[EndReason]
    END_REASON_QUEUE_FULL: _ClassVar[EndReason]
    END_REASON_QUEUE_TIMEOUT: _ClassVar[EndReason]
    END_REASON_FAULT: _ClassVar[EndReason]
    END_REASON_ENGINE_FAILED: _ClassVar[EndReason]
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
END_REASON_FINISHED: EndReason
END_REASON_QUEUE_FULL: EndReason
END_REASON_QUEUE_TIMEOUT: EndReason
END_REASON_FAULT: EndReason
END_REASON_ENGINE_FAILED: EndReason

class ConnectRequest(_message.Message):
    __slots__ = ("submits", "finishes")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    finishes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., finishes: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "prompt", "emitted", "max_tokens", "stop_ids", "controls", "patience")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prompt: bytes
    emitted: bytes
    max_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    controls: Controls
    patience: float
    def __init__(self, attempt: _Optional[int] = ..., prompt: _Optional[bytes] = ..., emitted: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., controls: _Optional[_Union[Controls, _Mapping]] = ..., patience: _Optional[float] = ...) -> None: ...

class Controls(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "top_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("info", "outputs", "stalled")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    outputs: Outputs
    stalled: float
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., stalled: _Optional[float] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("vocabulary", "context", "pool_tokens", "sequences", "pages", "dtype", "device")
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    vocabulary: int
    context: int
    pool_tokens: int
    sequences: int
    pages: int
    dtype: str
    device: str
    def __init__(self, vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., pages: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("attempts", "positions", "tokens", "chosen", "rank", "alternatives", "top_ids", "top", "starts", "ends", "stats", "step_seconds")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    attempts: bytes
    positions: bytes
    tokens: bytes
    chosen: bytes
    rank: bytes
    alternatives: int
    top_ids: bytes
    top: bytes
    starts: _containers.RepeatedCompositeFieldContainer[Start]
    ends: _containers.RepeatedCompositeFieldContainer[End]
    stats: Stats
    step_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, attempts: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., rank: _Optional[bytes] = ..., alternatives: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., step_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("attempt", "waited")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    waited: float
    def __init__(self, attempt: _Optional[int] = ..., waited: _Optional[float] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("attempt", "reason", "stop_token_id", "message", "retry_after")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    reason: EndReason
    stop_token_id: int
    message: str
    retry_after: float
    def __init__(self, attempt: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., stop_token_id: _Optional[int] = ..., message: _Optional[str] = ..., retry_after: _Optional[float] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "pages_used", "pages_total", "steps", "computed_tokens", "recomputed_tokens", "preemptions")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    steps: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., steps: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...
