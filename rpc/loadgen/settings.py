"""Settings of `quire bench serve`."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rpc.loadgen.lengths import Lengths

PROTOCOLS = ("quire", "inference", "openai")
SERVERS = {
    "quire": "127.0.0.1:50051",
    "inference": "127.0.0.1:50051",
    "openai": "http://127.0.0.1:8000/v1",
}
CONCURRENCY, REQUESTS = 8, 100
INPUT, OUTPUT = "128", "64"
OF_LOADS = {"rate": ("burstiness",), "trace": ("speed", "context")}
NOT_OF_TRACES = {
    "input_tokens": "how long prompts are",
    "output_tokens": "how many tokens to generate",
    "shared_prefix": "what prompts have in common",
    "seed": "when requests come and how long they are; of the text there is --prompt-seed",
}


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Number, times and lengths of a load's requests.

    Raises:
        ValueError: A value is out of its range, or flags do not go together.
    """

    concurrency: int | None = field(
        default=None,
        metadata={"help": f"Closed loop: requests at a time. Unset, with no other load: {CONCURRENCY}.", "min": 1},
    )
    rate: float | None = field(default=None, metadata={"help": "Open loop: requests a second on average."})
    burstiness: float | None = field(
        default=None,
        metadata={
            "help": "For --rate: 1 is a Poisson process, less comes in bursts, more is even, as in vLLM. Unset: 1."
        },
    )
    trace: str | None = field(
        default=None,
        metadata={"help": "Open loop: azure-conv, mooncake, or a file .csv (Azure's format) or .jsonl (Mooncake's)."},
    )
    speed: float | None = field(default=None, metadata={"help": "For --trace: factor of the arrivals' rate. Unset: 1."})
    context: int | None = field(
        default=None,
        metadata={
            "help": "For --trace: tokens that its longest request is shrunk to, the others alike. Unset: the "
            "server's context.",
            "min": 2,
        },
    )
    requests: int | None = field(
        default=None,
        metadata={
            "help": f"Number of requests. Unset, without --duration: the whole trace, else {REQUESTS}.",
            "min": 1,
        },
    )
    duration: float | None = field(
        default=None, metadata={"help": "Seconds after which no more requests are sent; those that run end."}
    )
    input_tokens: str | None = field(
        default=None,
        metadata={"help": f"Tokens of a prompt: 128, or any of 64-256. Unset, without --trace: {INPUT}."},
    )
    output_tokens: str | None = field(
        default=None,
        metadata={"help": f"Tokens to generate: 64, or any of 16-128. Unset, without --trace: {OUTPUT}."},
    )
    shared_prefix: int | None = field(
        default=None,
        metadata={"help": "Tokens at the front of each prompt that all prompts share. Unset: 0.", "min": 0},
    )
    ignore_eos: bool = field(
        default=True, metadata={"help": "Ask for all tokens, past the model's end; not all servers support it."}
    )
    warm_up: int = field(
        default=0,
        metadata={
            "help": "Requests before the measured ones, with other text, but with the same shared prefix.",
            "min": 0,
        },
    )
    seed: int | None = field(
        default=None, metadata={"help": "Seed of lengths and arrivals. Unset, without --trace: 0.", "min": 0}
    )
    prompt_seed: int | None = field(
        default=None,
        metadata={
            "help": "Seed of the prompts' text. Unset: a new one for each run, since caches may have the last one's.",
            "min": 0,
        },
    )
    timeout: float = field(default=600.0, metadata={"help": "Seconds after which a request counts as failed."})

    def __post_init__(self) -> None:
        loads = [f"--{name}" for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        if len(loads) > 1:
            raise ValueError(f"{' and '.join(loads)} are different loads: leave all but one out")
        for name in ("rate", "burstiness", "speed", "duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value}, must be above 0")
        for load, names in OF_LOADS.items():
            for name in names:
                if getattr(self, load) is None and getattr(self, name) is not None:
                    raise ValueError(f"--{name} is for --{load}, which is not given")
        if self.trace is not None:
            self._check_trace()
        elif (shared := self.shared_prefix or 0) > (least := self.inputs.least):
            raise ValueError(f"--shared-prefix {shared} is longer than the shortest prompt, {least} tokens")
        _ = self.outputs

    def _check_trace(self) -> None:
        """Raises ValueError for flags that do not go with --trace."""
        for name, why in NOT_OF_TRACES.items():
            if getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is not for --trace, which says itself {why}")

    @property
    def inputs(self) -> Lengths:
        return Lengths.parse(INPUT if self.input_tokens is None else self.input_tokens, "--input-tokens")

    @property
    def outputs(self) -> Lengths:
        return Lengths.parse(OUTPUT if self.output_tokens is None else self.output_tokens, "--output-tokens")

    def in_force(self) -> dict[str, Any]:
        """Returns all settings with this load's defaults; None for those that it does not use."""
        if self.trace is not None:
            defaults: dict[str, Any] = {"speed": 1.0}
        else:
            defaults = {"input_tokens": INPUT, "output_tokens": OUTPUT, "shared_prefix": 0, "seed": 0}
            if self.rate is not None:
                defaults["burstiness"] = 1.0
        defaults |= {"concurrency": self.together, "requests": self.count}
        return {name: defaults.get(name) if value is None else value for name, value in asdict(self).items()}

    @property
    def together(self) -> int | None:
        """Requests at a time of a closed loop; None for an open one."""
        return None if self.rate is not None or self.trace is not None else self.concurrency or CONCURRENCY

    @property
    def count(self) -> int | None:
        """Largest number of requests; None sets no limit."""
        if self.requests is None and self.duration is None and self.trace is None:
            return REQUESTS
        return self.requests
