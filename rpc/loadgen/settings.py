"""Settings of `quire bench serve`."""

import math
from dataclasses import dataclass, field

from rpc.loadgen.lengths import Lengths

PROTOCOLS = ("quire", "inference", "openai")
SERVERS = {
    "quire": "127.0.0.1:50051",
    "inference": "127.0.0.1:50051",
    "openai": "http://127.0.0.1:8000/v1",
}
CONCURRENCY, REQUESTS = 8, 100


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How many requests come, when, and how long they are. Raises ValueError."""

    concurrency: int | None = field(
        default=None,
        metadata={"help": f"Closed loop: so many at a time. Unset, with no other load: {CONCURRENCY}.", "min": 1},
    )
    rate: float | None = field(default=None, metadata={"help": "Open loop: requests a second on average."})
    burstiness: float = field(
        default=1.0,
        metadata={"help": "Of --rate: 1 is a Poisson process, less comes in bursts, more is even, as in vLLM."},
    )
    trace: str | None = field(
        default=None,
        metadata={"help": "Open loop: azure-conv, mooncake, or a file .csv (Azure's format) or .jsonl (Mooncake's)."},
    )
    speed: float = field(default=1.0, metadata={"help": "Of --trace: times as fast as they came."})
    context: int | None = field(
        default=None,
        metadata={
            "help": "Of --trace: its lengths are shrunk alike to fit so many tokens. Unset: what the server says.",
            "min": 2,
        },
    )
    requests: int | None = field(
        default=None,
        metadata={"help": f"How many. Unset, without --duration: the whole trace, else {REQUESTS}.", "min": 1},
    )
    duration: float | None = field(
        default=None, metadata={"help": "Seconds after which no more requests are sent; those that run end."}
    )
    input_tokens: str = field(default="128", metadata={"help": "Of each prompt: 128, or any of 64-256."})
    output_tokens: str = field(default="64", metadata={"help": "To generate: 64, or any of 16-128."})
    shared_prefix: int = field(
        default=0, metadata={"help": "Tokens at the front of each prompt that are alike in all.", "min": 0}
    )
    ignore_eos: bool = field(
        default=True, metadata={"help": "Ask for all tokens, past the model's end; not all servers can."}
    )
    warm_up: int = field(default=0, metadata={"help": "Requests before the measured ones, with other text.", "min": 0})
    seed: int = field(default=0, metadata={"help": "Of lengths and arrivals.", "min": 0})
    prompt_seed: int | None = field(
        default=None,
        metadata={
            "help": "Of the prompts' text. Unset: another in each run, for caches may have the last one's.",
            "min": 0,
        },
    )
    timeout: float = field(default=600.0, metadata={"help": "Seconds after which a request is lost."})

    def __post_init__(self) -> None:
        loads = [f"--{name}" for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        if len(loads) > 1:
            raise ValueError(f"{' and '.join(loads)} are different loads: leave all but one out")
        for name in ("rate", "burstiness", "speed", "duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value}, must be above 0")
        least = self.inputs.least
        if self.trace is None and self.shared_prefix > least:
            raise ValueError(f"--shared-prefix {self.shared_prefix} is longer than the shortest prompt, {least} tokens")
        if self.trace is not None and self.shared_prefix:
            raise ValueError("--shared-prefix is not for --trace, which says itself what prompts have in common")
        _ = self.outputs

    @property
    def inputs(self) -> Lengths:
        return Lengths.of(self.input_tokens, "--input-tokens")

    @property
    def outputs(self) -> Lengths:
        return Lengths.of(self.output_tokens, "--output-tokens")

    @property
    def together(self) -> int | None:
        """Requests at a time in a closed loop, None in an open one."""
        return None if self.rate is not None or self.trace is not None else self.concurrency or CONCURRENCY

    @property
    def count(self) -> int | None:
        """Requests at most, None: no such bound."""
        if self.requests is None and self.duration is None and self.trace is None:
            return REQUESTS
        return self.requests
