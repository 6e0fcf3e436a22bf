"""What a client asks (`Spec`), what an engine can do (`Limits`), what it is given (`Request`), and the one validator.

Every frontend (gRPC, command line, Python) builds a `Spec`; `resolve` checks it and makes the `Request`. Nothing behind
this file checks a client's values again.
"""

import math
import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import Scope
from scheduler.settings import RequestLimits

CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,64}")
BYTES_A_TOKEN = 16  # more than text in any language takes on average; bounds what is worth tokenizing


class InvalidRequest(ValueError):
    """A client's value that cannot be served: which field, what it held, what is allowed."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        super().__init__(f"{name} is {shown}: {reason}")
        self.field, self.reason = name, reason


def _require(allowed: object, name: str, value: object, reason: str) -> None:
    if not allowed:
        raise InvalidRequest(name, value, reason)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; None is the model's default. temperature 0 is greedy; top_k 0 is off.

    The order of the filters is vLLM's: temperature, min_p, top_k (ties kept), top_p (the token that crosses it kept).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:  # NaN fails every comparison
        t, p, k, m, s = self.temperature, self.top_p, self.top_k, self.min_p, self.seed
        _require(t is None or 0.0 <= t <= 2.0, "sampling.temperature", t, "must be in [0, 2]")
        _require(p is None or 0.0 < p <= 1.0, "sampling.top_p", p, "must be in (0, 1]")
        _require(k is None or 0 <= k < 2**32, "sampling.top_k", k, "must be in [0, 2^32), 0 is off")
        _require(m is None or 0.0 <= m <= 1.0, "sampling.min_p", m, "must be in [0, 1]")
        _require(s is None or 0 <= s < 2**64, "sampling.seed", s, "must be in [0, 2^64)")


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends. max_tokens None: what context and pool allow."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        n = self.max_tokens
        _require(n is None or n >= 1, "stopping.max_tokens", n, "must be at least 1")
        for i, text in enumerate(self.stop):
            _require(text != "", f"stopping.stop[{i}]", text, "must not be empty")


@dataclass(frozen=True, slots=True)
class Output:
    """What comes back. top_logprobs: alternatives at each position; more than 0 implies logprobs."""

    text: bool = True
    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Spec:
    """One request as a client states it. prompt: text, or token ids used as they are. Times are seconds.

    output_prefix: output that this prompt had already, to go on from; positions, limits and draws count it as output.
    cache_salt: the prefix cache is shared only with requests that have the same one.
    """

    prompt: str | tuple[int, ...]
    model: str = ""
    add_special_tokens: bool = True
    output_prefix: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: Output = field(default_factory=Output)
    max_time: float | None = None
    max_queue_time: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for name, value in (("max_time", self.max_time), ("max_queue_time", self.max_queue_time)):
            _require(value is None or 0 < value < math.inf, name, value, "must be a finite number of seconds above 0")
        salt = self.cache_salt
        _require(not salt or CACHE_SALT.fullmatch(salt), "cache_salt", salt, "must be 1 to 64 of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can serve, as its frontends need it.

    vocabulary: width of the logits. context: longest prompt + output of the model. pool_tokens: tokens the KV pool
    holds.
    """

    vocabulary: int
    context: int
    pool_tokens: int
    sequences: int
    request: RequestLimits = field(default_factory=RequestLimits)

    @property
    def longest(self) -> int:
        """Longest prompt + output: the last token of an output is never fed, so it needs no slot."""
        return min(self.context, self.pool_tokens + 1)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """From generation_config.json: what holds where a request is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Controls:
    """How an executor draws for one sequence. top_logprobs: -1 none, 0 the drawn token's only."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request that can be served. prompt: int32 token ids. stop_ids: end tokens and stop tokens that end it.

    patience: seconds it may wait in the queue; None leaves it to the queue's own limit. scope: with whom it shares the
    prefix cache.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    stop_ids: tuple[int, ...]
    controls: Controls
    patience: float | None = None
    scope: Scope = field(default_factory=Scope)


def resolve(
    spec: Spec, prompt: list[int], limits: Limits, defaults: ModelDefaults, minted_seed: int, public: int = 0
) -> Request:
    """Checks `spec`, whose prompt has these token ids, against an engine's limits.

    minted_seed: the seed where the client gave none. public: so many of the tokens are a public prefix. Raises
    InvalidRequest with the field, its value and the limit.
    """
    _check_sizes(spec, limits)
    where = "text" if isinstance(spec.prompt, str) else "token_ids"
    _require(len(prompt) > 0, where, spec.prompt, "the prompt has no tokens")
    _require(
        len(prompt) < limits.longest,
        where,
        f"{len(prompt)} tokens",
        f"prompt and output must fit in {limits.longest} tokens (model context {limits.context}, KV pool "
        f"{limits.pool_tokens}), and the output needs at least 1",
    )
    for name, ids in ((where, prompt), ("output_prefix", spec.output_prefix)):
        for token in (min(ids, default=0), max(ids, default=0)):
            _require(0 <= token < limits.vocabulary, name, token, f"token ids must be in [0, {limits.vocabulary})")
    room = limits.longest - len(prompt)
    known = len(spec.output_prefix)
    _require(known <= room, "output_prefix", f"{known} tokens", f"at most {room} fit after {len(prompt)} prompt tokens")
    asked = spec.stopping.max_tokens
    _require(
        asked is None or asked <= room,
        "stopping.max_tokens",
        asked,
        f"at most {room} fit after {len(prompt)} prompt tokens (model context {limits.context}, KV pool "
        f"{limits.pool_tokens} tokens)",
    )
    sampling, output = spec.sampling, spec.output
    top_logprobs = output.top_logprobs if output.logprobs or output.top_logprobs else -1
    ends = () if spec.stopping.ignore_eos else defaults.eos_token_ids
    return Request(
        prompt=np.array(prompt, np.int32),
        max_tokens=room if asked is None else asked,
        stop_ids=tuple(dict.fromkeys((*ends, *spec.stopping.stop_token_ids))),
        controls=Controls(
            temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
            top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
            top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
            min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
            seed=minted_seed if sampling.seed is None else sampling.seed,
            top_logprobs=top_logprobs,
        ),
        patience=spec.max_queue_time,
        scope=Scope(salt=spec.cache_salt, public=public),
    )


def _check_sizes(spec: Spec, limits: Limits) -> None:
    most, stopping, output = limits.request, spec.stopping, spec.output
    count = len(stopping.stop)
    _require(count <= most.stop_strings, "stopping.stop", f"{count} strings", f"at most {most.stop_strings}")
    for i, text in enumerate(stopping.stop):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"stopping.stop[{i}]", text, "is no Unicode text") from None
        _require(
            size <= most.stop_string_bytes,
            f"stopping.stop[{i}]",
            f"{size} bytes",
            f"at most {most.stop_string_bytes} bytes",
        )
    ids = stopping.stop_token_ids
    _require(
        len(ids) <= most.stop_token_ids, "stopping.stop_token_ids", f"{len(ids)} ids", f"at most {most.stop_token_ids}"
    )
    for i, token in enumerate(ids):
        _require(
            0 <= token < limits.vocabulary,
            f"stopping.stop_token_ids[{i}]",
            token,
            f"must be in [0, {limits.vocabulary})",
        )
    most_top = min(most.top_logprobs, limits.vocabulary)
    top = output.top_logprobs
    _require(0 <= top <= most_top, "output.top_logprobs", top, f"must be in [0, {most_top}]")


def check_text(text: str, limits: Limits) -> None:
    """Bounds the tokenizer's work, before it. Raises InvalidRequest."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("text", text, "is no Unicode text") from None
    most = max(2**16, BYTES_A_TOKEN * limits.longest)
    _require(size <= most, "text", f"{size} bytes", f"at most {most} bytes for {limits.longest} tokens")
