"""What a client asks (`Spec`), what an engine is given (`Request`), and the one validator between them.

Every frontend (gRPC, command line, Python) builds a `Spec`; `resolve` checks it and makes the `Request`. Nothing behind
this file checks a client's values again.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import DEFAULT_TENANT, ImageSpan, Scope
from scheduler.controls import Adjustments, Controls
from scheduler.keywords import explain_fields
from scheduler.limits import Limits, ModelDefaults

CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_MESSAGES = 4096  # of a conversation
MOST_SHOWN, MOST_NAMED, MOST_REASON = 60, 200, 500  # characters of an error's value, field and reason


class InvalidRequest(ValueError):
    """A client's value that cannot be served: which field, what it held, what is allowed; each cut at a length."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        name, reason = _cut(name, MOST_NAMED), _cut(reason, MOST_REASON)
        super().__init__(f"{name} is {_cut(repr(value), MOST_SHOWN)}: {reason}")
        self.field, self.value, self.reason = name, value, reason

    def of(self, name: str) -> "InvalidRequest":
        """The same of another field, where only the caller knows what a client calls it."""
        return InvalidRequest(name, self.value, self.reason)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _require(allowed: object, name: str, value: object, reason: str) -> None:
    if not allowed:
        raise InvalidRequest(name, value, reason)


def _require_several(name: str, values: object, form: str) -> None:
    """Refuses a single text, which would be read as its characters, and what has no order."""
    _require(isinstance(values, Sequence) and not isinstance(values, str), name, values, f"must be several: {form}")


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search in place of sampling. width: hypotheses that go on at once. length_penalty: exponent of the length in
    the score, which is the sum of the logprobs / length ^ penalty.
    """

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        w, p = self.width, self.length_penalty
        _require(w >= 1, "sampling.beam_search.width", w, "must be at least 1")
        _require(-10 <= p <= 10, "sampling.beam_search.length_penalty", p, "must be in [-10, 10]")


@explain_fields
@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; None is the model's default. temperature 0 is greedy; top_k 0 is off.

    The order is vLLM's: allowed_token_ids, bad_words, min_tokens, logit_bias, penalties (the repetition penalty, which
    counts the prompt too, then frequency and presence), temperature, min_p, top_k (ties kept), top_p (the token that
    crosses it kept). logit_bias: pairs of token id and what is added. allowed_token_ids: () allows all.

    sequence_count: outputs for the one prompt, each drawn for itself, or the best that `beam` finds.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    sequence_count: int = 1
    beam: Beam | None = None

    def __post_init__(self) -> None:  # NaN fails every comparison
        t, p, k, m, s = self.temperature, self.top_p, self.top_k, self.min_p, self.seed
        r = self.repetition_penalty
        _require(t is None or 0.0 <= t <= 2.0, "sampling.temperature", t, "must be in [0, 2]")
        _require(p is None or 0.0 < p <= 1.0, "sampling.top_p", p, "must be in (0, 1]")
        _require(k is None or 0 <= k < 2**32, "sampling.top_k", k, "must be in [0, 2^32), 0 is off")
        _require(m is None or 0.0 <= m <= 1.0, "sampling.min_p", m, "must be in [0, 1]")
        _require(s is None or 0 <= s < 2**64, "sampling.seed", s, "must be in [0, 2^64)")
        _require(
            r is None or 0 < r < math.inf, "sampling.repetition_penalty", r, "must be finite and above 0, 1 is off"
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(value is None or -2.0 <= value <= 2.0, f"sampling.{name}", value, "must be in [-2, 2], 0 is off")
        _require_several("sampling.logit_bias", self.logit_bias, "((5, -1.0), ...), pairs of token id and bias")
        for token, bias in self.logit_bias:
            _require(-100.0 <= bias <= 100.0, f"sampling.logit_bias[{token}]", bias, "must be in [-100, 100]")
        _require_several("sampling.allowed_token_ids", self.allowed_token_ids, "(5, ...)")
        _require_several("sampling.bad_words", self.bad_words, "('word', ...)")
        for i, word in enumerate(self.bad_words):
            _require(word.strip() != "", f"sampling.bad_words[{i}]", word, "must not be empty")


@explain_fields
@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends. max_tokens None: what context and pool allow. min_tokens: before there are so many, nothing
    else of this ends it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        n = self.max_tokens
        _require(n is None or n >= 1, "stopping.max_tokens", n, "must be at least 1")
        least = self.min_tokens
        _require(least >= 0, "stopping.min_tokens", least, "must be at least 0")
        _require(n is None or least <= n, "stopping.min_tokens", least, f"must be at most max_tokens, which is {n}")
        _require_several("stopping.stop_token_ids", self.stop_token_ids, "(5, ...)")
        _require_several("stopping.stop", self.stop, "('text', ...)")
        for i, text in enumerate(self.stop):
            _require(text != "", f"stopping.stop[{i}]", text, "must not be empty")


@explain_fields
@dataclass(frozen=True, slots=True)
class Output:
    """What comes back. top_logprobs: alternatives at each position; more than 0 implies logprobs. prompt_logprobs: of
    the prompt too, with as many alternatives; the prompt is then computed whole, whatever is cached of it.
    """

    text: bool = True
    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    skip_special_tokens: bool = True
    prompt_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class ImageHere:
    """A part of a message: here stands the first of the request's images that no part before it has."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. role: system, user, assistant or what the model's template knows. content: text, or
    texts and images in their order.
    """

    role: str
    content: str | tuple[str | ImageHere, ...]

    @property
    def parts(self) -> tuple[str | ImageHere, ...]:
        return (self.content,) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest message first.

    Attributes:
        arguments: Of the model's template, pairs of name and JSON.
        add_generation_prompt: The template is told to begin the model's next message.
        continue_final_message: The prompt ends with the text of the last message.
    """

    messages: tuple[ChatMessage, ...]
    arguments: tuple[tuple[str, str], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        check_message_count(len(self.messages))
        for i, message in enumerate(self.messages):
            role, content = message.role, message.content
            _require(isinstance(role, str) and role, f"chat.messages[{i}].role", role, "must be text, and not empty")
            name, known = f"chat.messages[{i}].content", isinstance(content, str | tuple)
            known = known and all(isinstance(part, str | ImageHere) for part in message.parts)
            _require(known, name, content, "must be text, or texts and images")
        if self.continue_final_message:
            name = "chat.continue_final_message"
            _require(not self.add_generation_prompt, name, True, "goes without chat.add_generation_prompt")
            texts = any(isinstance(part, str) for part in self.messages[-1].parts)
            _require(texts, name, True, "the last message has no text")

    @property
    def image_fields(self) -> tuple[str, ...]:
        """What a client calls each of its images, in their order."""
        return tuple(
            f"chat.messages[{i}].parts[{j}].image"
            for i, message in enumerate(self.messages)
            for j, part in enumerate(message.parts)
            if isinstance(part, ImageHere)
        )


def check_message_count(count: int) -> None:
    """For whoever makes a `Chat`, before the work. Raises InvalidRequest."""
    _require(1 <= count <= MOST_MESSAGES, "chat.messages", f"{count} messages", f"must be 1 to {MOST_MESSAGES}")


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt that is too long is cut.

    Attributes:
        tokens: Tokens that are kept; None for as many as leave room for the output.
        keep_first: Keeps the first tokens; else the last ones, behind the special tokens that begin a text.
    """

    tokens: int | None = None
    keep_first: bool = False

    def __post_init__(self) -> None:
        known = self.tokens is None or self.tokens > 0
        _require(known, "prompt_truncation.tokens", self.tokens, "must be at least 1; unset it for what fits")

    def cut(self, prompt: Sequence[int], beginning: int, stopping: Stopping, limits: Limits) -> list[int]:
        """Returns the tokens of the prompt that are kept. beginning: so many special tokens begin it."""
        keep = self.tokens if self.tokens is not None else max(1, limits.longest - (stopping.max_tokens or 1))
        if len(prompt) <= keep or self.keep_first:
            return list(prompt[:keep])
        beginning = min(beginning, keep)
        return [*prompt[:beginning], *prompt[len(prompt) - keep + beginning :]]


@dataclass(frozen=True, slots=True)
class Spec:
    """One request as a client states it. prompt: text, token ids used as they are, or a conversation that the model's
    own template makes text of. images: PNG or JPEG files, in the order of their placeholders, or of the parts of a
    conversation that they are. Times are seconds.

    output_prefix: output that this prompt had already, to go on from; positions, limits and draws count it as output.
    cache_salt: the prefix cache is shared only with requests that have the same one. priority: lower is served first,
    among those of the same tenant. tenant: whose request it is, as
    the door found it and no client says it.
    """

    prompt: str | tuple[int, ...] | Chat
    images: tuple[bytes, ...] = ()
    model: str = ""
    add_special_tokens: bool = True
    output_prefix: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: Output = field(default_factory=Output)
    max_time: float | None = None
    max_queue_time: float | None = None
    cache_salt: str = ""
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    truncation: Truncation | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_time", self.max_time), ("max_queue_time", self.max_queue_time)):
            _require(value is None or 0 < value < math.inf, name, value, "must be a finite number of seconds above 0")
        salt = self.cache_salt
        p = self.priority
        _require(-100 <= p <= 100, "priority", p, "must be in [-100, 100], lower is served first")
        _require(not salt or CACHE_SALT.fullmatch(salt), "cache_salt", salt, "must be 1 to 64 of A-Z a-z 0-9 _ -")
        if isinstance(self.prompt, Chat):
            parts, given = len(self.prompt.image_fields), f"{len(self.images)} images"
            _require(len(self.images) == parts, "images", given, f"the messages of the conversation have {parts}")
        whole = self.truncation is None or not self.images
        _require(whole, "prompt_truncation", f"with {len(self.images)} images", "goes with prompts without images")

    @property
    def image_fields(self) -> tuple[str, ...]:
        """What a client calls each of its images."""
        if isinstance(self.prompt, Chat):
            return self.prompt.image_fields
        return tuple(f"images[{i}]" for i in range(len(self.images)))


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt, cut as the model's encoder takes it. pixels: uint8 [tiles, 3, height, width]. digest: names
    them. places: int32 [features], positions of its placeholders in the prompt, ascending.
    """

    pixels: NDArray[np.uint8]
    digest: bytes
    places: NDArray[np.int32]

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(int(self.places[0]), int(self.places[-1]) + 1, self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request that can be served. prompt: int32 token ids. stop_ids: end tokens and stop tokens that end it.

    images: of the prompt, in order. patience: seconds it may wait in the queue; None leaves it to the queue's own
    limit. scope: with whom it shares the prefix cache. count: sequences that come of the prompt. beam: they are the
    best that a search finds. priority: as in `Spec`.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    stop_ids: tuple[int, ...]
    controls: Controls
    patience: float | None = None
    scope: Scope = field(default_factory=Scope)
    count: int = 1
    beam: Beam | None = None
    images: tuple[PromptImage, ...] = ()
    priority: int = 0

    @property
    def image_bytes(self) -> int:
        """Of the pixels of its images."""
        return sum(image.pixels.nbytes for image in self.images)

    @property
    def drawing(self) -> Controls:
        """How an executor draws for it: a search chooses among twice as many alternatives as it is wide."""
        if self.beam is None:
            return self.controls
        return replace(self.controls, top_logprobs=max(2 * self.beam.width, self.controls.top_logprobs))


def resolve(
    spec: Spec,
    prompt: list[int],
    limits: Limits,
    defaults: ModelDefaults,
    minted_seed: int,
    public: int = 0,
    bad_words: Sequence[Sequence[int]] = (),
    images: tuple[PromptImage, ...] = (),
    prefix_lm: bool = False,
) -> Request:
    """Checks `spec`, whose prompt has these token ids, against an engine's limits.

    minted_seed: the seed where the client gave none. public: so many of the tokens are a public prefix. bad_words:
    token ids of the spec's, in each way that they may be written. images: of the prompt. prefix_lm: the tokens of a
    prompt see each other in both directions. Raises InvalidRequest with the field, its value and the limit.
    """
    _check_sizes(spec, limits)
    where = {str: "text", Chat: "chat"}.get(type(spec.prompt), "token_ids")
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
    least = spec.stopping.min_tokens
    _require(least <= room, "stopping.min_tokens", least, f"at most {room} fit after {len(prompt)} prompt tokens")
    sampling, output = spec.sampling, spec.output
    top_logprobs = output.top_logprobs if output.logprobs or output.top_logprobs else -1
    ends = () if spec.stopping.ignore_eos else defaults.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*ends, *spec.stopping.stop_token_ids)))
    temperature = defaults.temperature if sampling.temperature is None else sampling.temperature
    _check_count(spec, temperature, limits)
    if sampling.beam is not None:
        _check_beam(spec, sampling.beam, limits)
        defaults, temperature = replace(defaults, repetition_penalty=1.0), 0.0
    return Request(
        prompt=np.array(prompt, np.int32),
        max_tokens=room if asked is None else asked,
        stop_ids=stop_ids,
        controls=Controls(
            temperature=temperature,
            top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
            top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
            min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
            seed=minted_seed if sampling.seed is None else sampling.seed,
            top_logprobs=top_logprobs,
            adjustments=_adjustments(spec, stop_ids, limits, defaults, bad_words),
            prompt_logprobs=output.prompt_logprobs,
        ),
        patience=spec.max_queue_time,
        scope=Scope(
            tenant=spec.tenant,
            salt=spec.cache_salt,
            public=public,
            images=tuple(image.span for image in images),
            whole=len(prompt) if prefix_lm else 0,
        ),
        count=sampling.sequence_count,
        beam=sampling.beam,
        images=images,
        priority=spec.priority,
    )


def _check_count(spec: Spec, temperature: float, limits: Limits) -> None:
    name, count = "sampling.sequence_count", spec.sampling.sequence_count
    most = min(limits.request.sequence_count, limits.sequences)
    _require(1 <= count <= most, name, count, f"must be in [1, {most}]")
    different = count == 1 or temperature > 0 or spec.sampling.beam is not None
    _require(different, name, count, "temperature is 0: all sequences would be the same")
    known = f"{len(spec.output_prefix)} tokens"
    _require(count == 1 or not spec.output_prefix, "output_prefix", known, "goes with one sequence alone")


def _check_beam(spec: Spec, beam: Beam, limits: Limits) -> None:
    """A search goes by the logprobs of the model alone, and text that it could stop at is not there before its end."""
    sampling, stopping = spec.sampling, spec.stopping
    name, most = "sampling.beam_search.width", min(limits.request.beam_width, limits.sequences, limits.vocabulary // 2)
    _require(not limits.logits_processors, name, beam.width, "does not go with the server's logits processors")
    _require(beam.width <= most, name, beam.width, f"must be in [1, {most}]")
    count = sampling.sequence_count
    _require(beam.width >= count, name, beam.width, f"must be at least sampling.sequence_count, which is {count}")
    for field_name, value, neutral in (
        ("sampling.temperature", sampling.temperature, 0.0),
        ("sampling.top_p", sampling.top_p, 1.0),
        ("sampling.top_k", sampling.top_k, 0),
        ("sampling.min_p", sampling.min_p, 0.0),
        ("sampling.seed", sampling.seed, None),
        ("sampling.repetition_penalty", sampling.repetition_penalty, 1.0),
        ("sampling.frequency_penalty", sampling.frequency_penalty, 0.0),
        ("sampling.presence_penalty", sampling.presence_penalty, 0.0),
        ("sampling.logit_bias", sampling.logit_bias, ()),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids, ()),
        ("sampling.bad_words", sampling.bad_words, ()),
        ("stopping.stop", stopping.stop, ()),
        ("stopping.min_tokens", stopping.min_tokens, 0),
        ("output_prefix", spec.output_prefix, ()),
    ):
        _require(value is None or value == neutral, field_name, value, "does not go with sampling.beam_search")


def _adjustments(
    spec: Spec,
    stop_ids: tuple[int, ...],
    limits: Limits,
    defaults: ModelDefaults,
    bad_words: Sequence[Sequence[int]],
) -> Adjustments:
    sampling, least, most = spec.sampling, spec.stopping.min_tokens, limits.request.bad_word_tokens
    size = sum(map(len, bad_words))
    _require(size <= most, "sampling.bad_words", f"{size} tokens", f"at most {most} in all their ways of writing")
    return Adjustments(
        allowed=tuple(dict.fromkeys(sampling.allowed_token_ids)),
        banned=tuple(dict.fromkeys(map(tuple, filter(None, bad_words)))),
        not_yet=stop_ids if least else (),
        min_tokens=least if stop_ids else 0,
        bias=sampling.logit_bias,
        repetition=defaults.repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty,
        frequency=sampling.frequency_penalty or 0.0,
        presence=sampling.presence_penalty or 0.0,
    )


def _check_sizes(spec: Spec, limits: Limits) -> None:
    most, stopping, sampling, output = limits.request, spec.stopping, spec.sampling, spec.output
    least = most.least_priority
    _require(spec.priority >= least, "priority", spec.priority, f"must be at least {least} on this server")
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
    biases = sampling.logit_bias
    _require(
        len(biases) <= most.logit_biases, "sampling.logit_bias", f"{len(biases)} ids", f"at most {most.logit_biases}"
    )
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, most.stop_token_ids, limits)
    check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, limits.vocabulary, limits)
    for token, _ in biases:
        _require(
            0 <= token < limits.vocabulary,
            f"sampling.logit_bias[{token}]",
            token,
            f"must be in [0, {limits.vocabulary})",
        )
    most_top = min(most.top_logprobs, limits.vocabulary)
    top = output.top_logprobs
    _require(0 <= top <= most_top, "output.top_logprobs", top, f"must be in [0, {most_top}]")


def check_ids(name: str, ids: Sequence[int], most: int, limits: Limits) -> None:
    """At most so many, each in the vocabulary. Raises InvalidRequest."""
    _require(len(ids) <= most, name, f"{len(ids)} ids", f"at most {most}")
    for i, token in enumerate(ids):
        if not 0 <= token < limits.vocabulary:
            raise InvalidRequest(f"{name}[{i}]", token, f"must be in [0, {limits.vocabulary})")
