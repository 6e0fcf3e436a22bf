from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Question(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUESTION_UNSPECIFIED: _ClassVar[Question]
    QUESTION_PAGE_MAP: _ClassVar[Question]
    QUESTION_RESET_PREFIX_CACHE: _ClassVar[Question]

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
    END_REASON_STUCK: _ClassVar[EndReason]
QUESTION_UNSPECIFIED: Question
QUESTION_PAGE_MAP: Question
QUESTION_RESET_PREFIX_CACHE: Question
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
END_REASON_FINISHED: EndReason
END_REASON_QUEUE_FULL: EndReason
END_REASON_QUEUE_TIMEOUT: EndReason
END_REASON_FAULT: EndReason
END_REASON_ENGINE_FAILED: EndReason
END_REASON_STUCK: EndReason

class PagesRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class PagesResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[Page]
    def __init__(self, pages: _Optional[_Iterable[_Union[Page, _Mapping]]] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ("tokens", "content", "checksum", "tables")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    content: bytes
    checksum: int
    tables: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., content: _Optional[bytes] = ..., checksum: _Optional[int] = ..., tables: _Optional[bytes] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("submits", "aborts", "asks")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    asks: _containers.RepeatedCompositeFieldContainer[Ask]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., asks: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt", "index")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    index: int
    def __init__(self, attempt: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("ticket", "question")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    question: Question
    def __init__(self, ticket: _Optional[int] = ..., question: _Optional[_Union[Question, str]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "prompt", "emitted", "max_tokens", "stop_ids", "controls", "queue_timeout", "tenant", "cache_salt", "public_tokens", "count", "beam", "images", "bidirectional", "again", "isolated_steps", "source", "priority", "deadline")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BIDIRECTIONAL_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    prompt: bytes
    emitted: _containers.RepeatedCompositeFieldContainer[Emitted]
    max_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    controls: Controls
    queue_timeout: float
    tenant: str
    cache_salt: str
    public_tokens: int
    count: int
    beam: Beam
    images: _containers.RepeatedCompositeFieldContainer[Image]
    bidirectional: int
    again: bool
    isolated_steps: int
    source: Source
    priority: int
    deadline: float
    def __init__(self, attempt: _Optional[int] = ..., prompt: _Optional[bytes] = ..., emitted: _Optional[_Iterable[_Union[Emitted, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., controls: _Optional[_Union[Controls, _Mapping]] = ..., queue_timeout: _Optional[float] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., public_tokens: _Optional[int] = ..., count: _Optional[int] = ..., beam: _Optional[_Union[Beam, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., bidirectional: _Optional[int] = ..., again: _Optional[bool] = ..., isolated_steps: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., priority: _Optional[int] = ..., deadline: _Optional[float] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("address", "token")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    address: str
    token: str
    def __init__(self, address: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("pixels", "shape", "digest", "places", "grid", "positions")
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    pixels: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: bytes
    places: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    positions: bytes
    def __init__(self, pixels: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[bytes] = ..., places: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ..., positions: _Optional[bytes] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("width", "length_penalty")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ...) -> None: ...

class Emitted(_message.Message):
    __slots__ = ("tokens", "ended")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    ended: bool
    def __init__(self, tokens: _Optional[bytes] = ..., ended: _Optional[bool] = ...) -> None: ...

class Controls(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "top_logprobs", "logits_params", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int
    logits_params: LogitsParams
    prompt_logprobs: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., logits_params: _Optional[_Union[LogitsParams, _Mapping]] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class LogitsParams(_message.Message):
    __slots__ = ("allowed", "banned", "not_yet", "min_tokens", "biased", "biases", "repetition", "frequency", "presence", "processors_args", "grammar", "grammar_salt", "reasoning_tokens", "reasoning_begin", "reasoning_end", "reasons", "reasons_again", "grammar_tokens", "grammar_short", "grammar_stops")
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIASED_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_ARGS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_SALT_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    REASONS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_SHORT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_STOPS_FIELD_NUMBER: _ClassVar[int]
    allowed: _containers.RepeatedScalarFieldContainer[int]
    banned: _containers.RepeatedCompositeFieldContainer[Tokens]
    not_yet: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    biased: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    repetition: float
    frequency: float
    presence: float
    processors_args: _containers.RepeatedCompositeFieldContainer[ProcessorArgs]
    grammar: str
    grammar_salt: str
    reasoning_tokens: int
    reasoning_begin: _containers.RepeatedScalarFieldContainer[int]
    reasoning_end: _containers.RepeatedScalarFieldContainer[int]
    reasons: bool
    reasons_again: bool
    grammar_tokens: int
    grammar_short: int
    grammar_stops: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, allowed: _Optional[_Iterable[int]] = ..., banned: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., not_yet: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., biased: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., repetition: _Optional[float] = ..., frequency: _Optional[float] = ..., presence: _Optional[float] = ..., processors_args: _Optional[_Iterable[_Union[ProcessorArgs, _Mapping]]] = ..., grammar: _Optional[str] = ..., grammar_salt: _Optional[str] = ..., reasoning_tokens: _Optional[int] = ..., reasoning_begin: _Optional[_Iterable[int]] = ..., reasoning_end: _Optional[_Iterable[int]] = ..., reasons: _Optional[bool] = ..., reasons_again: _Optional[bool] = ..., grammar_tokens: _Optional[int] = ..., grammar_short: _Optional[int] = ..., grammar_stops: _Optional[_Iterable[int]] = ...) -> None: ...

class ProcessorArgs(_message.Message):
    __slots__ = ("name", "args")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    args: str
    def __init__(self, name: _Optional[str] = ..., args: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("info", "outputs", "stalled", "overdue")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    outputs: Outputs
    stalled: float
    overdue: str
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., stalled: _Optional[float] = ..., overdue: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("vocabulary", "context", "pool_tokens", "sequences", "pages", "dtype", "device", "page_size", "numerics", "metrics", "logits_processors", "structured_output")
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    vocabulary: int
    context: int
    pool_tokens: int
    sequences: int
    pages: int
    dtype: str
    device: str
    page_size: int
    numerics: bytes
    metrics: str
    logits_processors: _containers.RepeatedScalarFieldContainer[str]
    structured_output: bool
    def __init__(self, vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., pages: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., page_size: _Optional[int] = ..., numerics: _Optional[bytes] = ..., metrics: _Optional[str] = ..., logits_processors: _Optional[_Iterable[str]] = ..., structured_output: _Optional[bool] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("attempts", "positions", "tokens", "chosen", "rank", "alternatives", "top_ids", "top", "starts", "ends", "stats", "step_seconds", "answers", "prompt_parts", "indices", "overheads", "kv_events")
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
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PARTS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    OVERHEADS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
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
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    prompt_parts: _containers.RepeatedCompositeFieldContainer[PromptPart]
    indices: bytes
    overheads: _containers.RepeatedScalarFieldContainer[float]
    kv_events: _containers.RepeatedCompositeFieldContainer[KVEvents]
    def __init__(self, attempts: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., chosen: _Optional[bytes] = ..., rank: _Optional[bytes] = ..., alternatives: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., step_seconds: _Optional[_Iterable[float]] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., prompt_parts: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ..., indices: _Optional[bytes] = ..., overheads: _Optional[_Iterable[float]] = ..., kv_events: _Optional[_Iterable[_Union[KVEvents, _Mapping]]] = ...) -> None: ...

class KVEvents(_message.Message):
    __slots__ = ("removed", "added")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    added: bytes
    def __init__(self, removed: _Optional[bytes] = ..., added: _Optional[bytes] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("attempt", "start", "chosen", "rank", "alternatives", "top_ids", "top")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    start: int
    chosen: bytes
    rank: bytes
    alternatives: int
    top_ids: bytes
    top: bytes
    def __init__(self, attempt: _Optional[int] = ..., start: _Optional[int] = ..., chosen: _Optional[bytes] = ..., rank: _Optional[bytes] = ..., alternatives: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("ticket", "forgotten", "page_map")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_MAP_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    forgotten: int
    page_map: PageMap
    def __init__(self, ticket: _Optional[int] = ..., forgotten: _Optional[int] = ..., page_map: _Optional[_Union[PageMap, _Mapping]] = ...) -> None: ...

class PageMap(_message.Message):
    __slots__ = ("page_size", "states", "counts", "holders")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    states: bytes
    counts: bytes
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, page_size: _Optional[int] = ..., states: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("step", "number", "pages")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    step: bool
    number: int
    pages: bytes
    def __init__(self, step: _Optional[bool] = ..., number: _Optional[int] = ..., pages: _Optional[bytes] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("attempt", "age", "cached")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    age: float
    cached: int
    def __init__(self, attempt: _Optional[int] = ..., age: _Optional[float] = ..., cached: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("attempt", "reason", "stop_token_id", "message", "retry_after", "index", "more")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    reason: EndReason
    stop_token_id: int
    message: str
    retry_after: float
    index: int
    more: bool
    def __init__(self, attempt: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., stop_token_id: _Optional[int] = ..., message: _Optional[str] = ..., retry_after: _Optional[float] = ..., index: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "pages_used", "pages_total", "steps", "computed_tokens", "recomputed_tokens", "preemptions", "pages_cached", "pages_shared", "slots_unused", "prefix_queries", "prefix_hits", "evicted_capacity", "evicted_reset", "evicted_fault", "lifetimes", "lifetime_seconds", "imbalances", "host_slots", "host_slots_used", "swapped_out", "swapped_in", "swap_lost", "pages_peak", "page_bytes", "pages_if_copied", "images_encoded", "isolated", "waiting_seconds", "pages_transferred", "draft_tokens", "accepted_tokens", "jump_forward_tokens", "preemptions_priority", "preemptions_pages", "preemptions_search", "preemptions_lost_copy")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SHARED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    EVICTED_RESET_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FAULT_FIELD_NUMBER: _ClassVar[int]
    LIFETIMES_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IMBALANCES_FIELD_NUMBER: _ClassVar[int]
    HOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    SWAP_LOST_FIELD_NUMBER: _ClassVar[int]
    PAGES_PEAK_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_IF_COPIED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JUMP_FORWARD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_SEARCH_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_LOST_COPY_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    steps: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    pages_cached: int
    pages_shared: int
    slots_unused: int
    prefix_queries: int
    prefix_hits: int
    evicted_capacity: int
    evicted_reset: int
    evicted_fault: int
    lifetimes: _containers.RepeatedScalarFieldContainer[int]
    lifetime_seconds: float
    imbalances: int
    host_slots: int
    host_slots_used: int
    swapped_out: int
    swapped_in: int
    swap_lost: int
    pages_peak: int
    page_bytes: int
    pages_if_copied: int
    images_encoded: int
    isolated: int
    waiting_seconds: float
    pages_transferred: int
    draft_tokens: int
    accepted_tokens: int
    jump_forward_tokens: int
    preemptions_priority: int
    preemptions_pages: int
    preemptions_search: int
    preemptions_lost_copy: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., steps: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_shared: _Optional[int] = ..., slots_unused: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., evicted_capacity: _Optional[int] = ..., evicted_reset: _Optional[int] = ..., evicted_fault: _Optional[int] = ..., lifetimes: _Optional[_Iterable[int]] = ..., lifetime_seconds: _Optional[float] = ..., imbalances: _Optional[int] = ..., host_slots: _Optional[int] = ..., host_slots_used: _Optional[int] = ..., swapped_out: _Optional[int] = ..., swapped_in: _Optional[int] = ..., swap_lost: _Optional[int] = ..., pages_peak: _Optional[int] = ..., page_bytes: _Optional[int] = ..., pages_if_copied: _Optional[int] = ..., images_encoded: _Optional[int] = ..., isolated: _Optional[int] = ..., waiting_seconds: _Optional[float] = ..., pages_transferred: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., jump_forward_tokens: _Optional[int] = ..., preemptions_priority: _Optional[int] = ..., preemptions_pages: _Optional[int] = ..., preemptions_search: _Optional[int] = ..., preemptions_lost_copy: _Optional[int] = ...) -> None: ...
