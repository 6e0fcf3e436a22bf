"""Settings of a frontend."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Seconds, unless the name says otherwise. request_time: longest life of a request. write_stall: longest time that
    one message may wait for a client to read. stall_timeout: an engine with work and no progress for this long is
    unhealthy. batch_concurrency: entries of one BatchGenerate that are in the engine at once.
    """

    request_time: float = 600.0
    write_stall: float = 30.0
    backlog_tokens: int = 1024
    stall_timeout: float = 30.0
    drain: float = 60.0
    tokenizer_threads: int = 2
    batch_concurrency: int = 256
