"""Settings of a frontend."""

from dataclasses import dataclass, field

from model.inputs.chat_output.families import AUTO, NONE, REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES
from model.inputs.grammar_backends import BACKENDS, LLGUIDANCE, check_backend


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Times, in seconds, and bounds of what a frontend holds for its clients."""

    request_time: float = field(
        default=600.0, metadata={"flag": "--max-request-time", "help": "Seconds that a request may take in all."}
    )
    backlog_tokens: int = field(
        default=1024,
        metadata={
            "flag": "--max-backlog",
            "help": "Tokens that may wait for a slow reader of a stream, or for an answer about its constraint.",
        },
    )
    write_stall: float = field(
        default=30.0, metadata={"flag": "--write-stall", "help": "Seconds that one message may wait for its reader."}
    )
    max_preparing: int = field(default=256, metadata={"help": "Requests that may wait for the tokenizer."})
    image_memory: int = field(
        default=2**30,
        metadata={
            "flag": "--max-live-image-memory",
            "size": True,
            "help": "Bytes of cut images that requests may hold until they end; an engine in another process holds as "
            "many.",
        },
    )
    drain: float = field(
        default=60.0, metadata={"flag": "--drain-time", "help": "Seconds that running requests get after SIGTERM."}
    )
    failover: float = field(
        default=120.0,
        metadata={
            "flag": "--failover-time",
            "help": "Seconds that requests wait for an engine, the first one or another one, while there is none.",
        },
    )
    max_parked: int = field(
        default=1024, metadata={"help": "New requests that may wait while there is no engine; 0 refuses them at once."}
    )
    stall_timeout: float = field(
        default=30.0, metadata={"help": "Seconds of work without progress after which health says NOT_SERVING."}
    )
    tokenizer_threads: int = field(
        default=2, metadata={"help": "Threads that tokenize and validate prompts; as many for chats, and for images."}
    )
    public_prefixes: str | None = field(
        default=None,
        metadata={
            "help": "A text file, or a directory of them, each the start of prompts whose KV all tenants may share."
        },
    )

    tool_format: str = field(
        default=AUTO,
        metadata={
            "help": f"Form of the model's tool calls: {AUTO} goes by its chat template, {NONE} reads none. Forms: "
            f"{', '.join(TOOL_FORMAT_NAMES)}."
        },
    )
    reasoning_format: str = field(
        default=AUTO,
        metadata={
            "help": f"Form of the model's reasoning: {AUTO} goes by its chat template, {NONE} leaves it in the text. "
            f"Forms: {', '.join(REASONING_FORMAT_NAMES)}."
        },
    )
    structured_output_backend: str = field(
        default=LLGUIDANCE,
        metadata={
            "help": f"Library that keeps constraints on outputs: {', '.join(BACKENDS)}. With xgrammar, llguidance "
            "keeps Lark's grammars, structural tags, tool calls and reasoning."
        },
    )

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-request-time", self.request_time),
            ("--max-backlog", self.backlog_tokens),
            ("--write-stall", self.write_stall),
            ("--max-preparing", self.max_preparing),
            ("--max-live-image-memory", self.image_memory),
            ("--drain-time", self.drain),
            ("--failover-time", self.failover),
            ("--stall-timeout", self.stall_timeout),
            ("--tokenizer-threads", self.tokenizer_threads),
        ):
            if not value > 0:
                raise ValueError(f"{flag} is {value}, must be above 0")
        for flag, name, known in (
            ("--tool-format", self.tool_format, TOOL_FORMAT_NAMES),
            ("--reasoning-format", self.reasoning_format, REASONING_FORMAT_NAMES),
        ):
            if name not in (AUTO, NONE, *known):
                raise ValueError(f"{flag} is {name!r}, must be one of {', '.join((AUTO, NONE, *known))}")
        try:
            check_backend(self.structured_output_backend)
        except ValueError as error:
            raise ValueError(f"--structured-output-backend: {error}") from None
        if self.max_parked < 0:
            raise ValueError(f"--max-parked is {self.max_parked}, must be at least 0")
