"""The one validator: checks a `Spec` against an engine's limits, and makes the `Request`.

Every way in (gRPC, command line, Python) builds a `Spec`. Its classes refuse values that are wrong whatever the model;
`resolve` refuses what this engine cannot serve. Nothing behind it checks a client's values again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from cache_manager.block_hash import Scope
from scheduler.controls import Controls, LogitsParams
from scheduler.invalid import InvalidRequest, require
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameter import parameters_of
from scheduler.parameters import Beam, Sampling
from scheduler.prompts import Chat
from scheduler.request import PromptImage, Request
from scheduler.spec import Spec
from scheduler.structured import FIELD, Structured
from scheduler.tools import ToolChoice, ToolUse

NO_REASONING: Mapping[str, Any] = {}


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
    grammar: str = "",
    short: int | None = None,
    least: int = 0,
    reasoning: Mapping[str, Any] = NO_REASONING,
) -> Request:
    """Checks a client's request against an engine's limits, and returns what the engine runs.

    Args:
        spec: A client's request.
        prompt: Token ids of its prompt.
        limits: Limits of the engine.
        defaults: The model's defaults.
        minted_seed: The seed where the client gave none.
        public: Number of tokens at the front that are a public prefix.
        bad_words: Token ids of the spec's bad words, in each way that they may be written.
        images: Images of the prompt.
        prefix_lm: Whether the prompt is a bidirectional prefix.
        grammar: Of the spec's constraint on its output, which `check_structured` has accepted; "" for none.
        short: Tokens of a short output with the grammar; None where none is known. An engine closes the output in time.
        least: Fewest tokens of an output with it, 0 where that is not known.
        reasoning: Fields of `LogitsParams` that bound the reasoning.

    Raises:
        InvalidRequest: Names the field, its value and the limit.
    """
    _check_sizes(spec, limits)
    _check_tokens(spec, prompt, limits)
    room = limits.longest - len(prompt)
    _check_room(spec, len(prompt), room, limits)
    sampling, stopping = spec.sampling, spec.stopping
    _check_count(spec, defaults.temperature if sampling.temperature is None else sampling.temperature, limits)
    if sampling.beam is not None:
        _check_beam(spec, sampling.beam, limits)
        defaults = replace(defaults, temperature=0.0, repetition_penalty=1.0)
    ends = () if stopping.ignore_eos else defaults.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*ends, *stopping.stop_token_ids)))
    values = _values_in_force(sampling, defaults, minted_seed)
    most_tokens = room if stopping.max_tokens is None else stopping.max_tokens
    closed = {"grammar_tokens": most_tokens, "grammar_short": short} if grammar and short is not None else {}
    if not spec.output_prefix:
        says = f"the shortest output that keeps the constraint has {least} tokens"
        require(least <= most_tokens, "stopping.max_tokens", most_tokens, says)
    return Request(
        prompt=np.array(prompt, np.int32),
        max_tokens=most_tokens,
        stop_ids=stop_ids,
        controls=_controls(
            spec, values, _logits_params(spec, {**values, **reasoning, **closed}, stop_ids, limits, bad_words, grammar)
        ),
        queue_timeout=spec.max_queue_time,
        scope=Scope(
            tenant=spec.tenant,
            salt=spec.cache_salt,
            public=public,
            images=tuple(image.span for image in images),
            bidirectional=len(prompt) if prefix_lm else 0,
        ),
        count=sampling.sequence_count,
        beam=sampling.beam,
        images=images,
        priority=spec.priority,
    )


def _check_sizes(spec: Spec, limits: Limits) -> None:
    """Checks the operator's limits, whatever the prompt."""
    most, sampling, stopping = limits.request, spec.sampling, spec.stopping
    least = most.least_priority
    require(spec.priority >= least, "priority", spec.priority, f"must be at least {least} on this server")
    count = len(stopping.stop)
    require(count <= most.stop_strings, "stopping.stop", f"{count} strings", f"at most {most.stop_strings}")
    for i, text in enumerate(stopping.stop):
        name, limit = f"stopping.stop[{i}]", most.stop_string_bytes
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(name, text, "is no Unicode text") from None
        require(size <= limit, name, f"{size} bytes", f"at most {limit} bytes")
    name, biases = "sampling.logit_bias", sampling.logit_bias
    require(len(biases) <= most.logit_biases, name, f"{len(biases)} ids", f"at most {most.logit_biases}")
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, most.stop_token_ids, limits)
    check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, limits.vocabulary, limits)
    for token, _ in biases:
        require(0 <= token < limits.vocabulary, f"{name}[{token}]", token, f"must be in [0, {limits.vocabulary})")
    _check_processors(sampling, limits)
    most_top, top = min(most.top_logprobs, limits.vocabulary), spec.output.top_logprobs
    require(0 <= top <= most_top, "output.top_logprobs", top, f"must be in [0, {most_top}]")


def _check_processors(sampling: Sampling, limits: Limits) -> None:
    """Checks the arguments of logits processors, which the engine knows by name."""
    name, known = "sampling.logits_processors_args", limits.logits_processors
    size, most = 0, limits.request.logits_processors_args_bytes
    for processor, text in sampling.logits_processors_args:
        has = f"has {', '.join(known)}" if known else "has none"
        require(
            processor in known, f"{name}[{processor[:64]}]", text, f"is no logits processor of this server, which {has}"
        )
        size += len(text.encode())
    require(size <= most, name, f"{size} bytes", f"at most {most} bytes")


def check_ids(name: str, ids: Sequence[int], most: int, limits: Limits) -> None:
    """Checks that at most `most` ids are given, each in the vocabulary. Raises InvalidRequest."""
    require(len(ids) <= most, name, f"{len(ids)} ids", f"at most {most}")
    for i, token in enumerate(ids):
        if not 0 <= token < limits.vocabulary:
            raise InvalidRequest(f"{name}[{i}]", token, f"must be in [0, {limits.vocabulary})")


def check_structured(spec: Spec, structured: Structured, limits: Limits) -> None:
    """Checks a constraint's size, and that nothing beside it ends the output elsewhere. Raises InvalidRequest.

    A stop string, and a stop token, end it only where it is complete.
    """
    size, most = len(structured.text.encode()), limits.request.structured_output_bytes
    require(size <= most, structured.path, f"{size} bytes", f"at most {most} bytes")
    _check_ends(spec, FIELD)
    require(limits.structured_output, structured.path, structured.text, NEEDED)


def check_tool_use(spec: Spec, tool_use: ToolUse, limits: Limits) -> None:
    """Checks tools whose calls are enforced, as `check_structured`. Stop strings end the text beside calls alone."""
    size, most = sum(len(tool.parameters.encode()) for tool in tool_use.tools), limits.request.structured_output_bytes
    require(size <= most, "chat.tools", f"{size} bytes of parameters", f"at most {most} bytes")
    name = "chat.tool_choice" if tool_use.choice is ToolChoice.REQUIRED else "chat.tools"
    _check_ends(spec, f"{name} that are enforced" if name == "chat.tools" else name)
    require(limits.structured_output, name, tool_use.choice.value, NEEDED)


def _check_ends(spec: Spec, constraint: str) -> None:
    ignores = spec.stopping.ignore_eos
    require(not ignores, "stopping.ignore_eos", ignores, f"does not go with {constraint}: a complete output has to end")


NEEDED = "needs a model with an end token, and a tokenizer of bytes (BPE or SentencePiece): this one has not both"


def _check_tokens(spec: Spec, prompt: list[int], limits: Limits) -> None:
    """Checks that the prompt leaves room for output, and that its ids are the model's."""
    where = {str: "text", Chat: "chat"}.get(type(spec.prompt), "token_ids")
    require(len(prompt) > 0, where, spec.prompt, "the prompt has no tokens")
    require(
        len(prompt) < limits.longest,
        where,
        f"{len(prompt)} tokens",
        f"prompt and output must fit in {limits.longest} tokens (model context {limits.context}, KV pool "
        f"{limits.pool_tokens}), and the output needs at least 1",
    )
    for name, ids in ((where, prompt), ("output_prefix", spec.output_prefix)):
        for token in (min(ids, default=0), max(ids, default=0)):
            require(0 <= token < limits.vocabulary, name, token, f"token ids must be in [0, {limits.vocabulary})")


def _check_room(spec: Spec, prompt_tokens: int, room: int, limits: Limits) -> None:
    """Checks that the output fits behind the prompt."""
    known, asked, least = len(spec.output_prefix), spec.stopping.max_tokens, spec.stopping.min_tokens
    fits = f"at most {room} fit after {prompt_tokens} prompt tokens"
    require(known <= room, "output_prefix", f"{known} tokens", fits)
    require(
        asked is None or asked <= room,
        "stopping.max_tokens",
        asked,
        f"{fits} (model context {limits.context}, KV pool {limits.pool_tokens} tokens)",
    )
    require(least <= room, "stopping.min_tokens", least, fits)


def _check_count(spec: Spec, temperature: float, limits: Limits) -> None:
    name, count = "sampling.sequence_count", spec.sampling.sequence_count
    most = min(limits.request.sequence_count, limits.sequences)
    require(1 <= count <= most, name, count, f"must be in [1, {most}]")
    different = count == 1 or temperature > 0 or spec.sampling.beam is not None
    require(different, name, count, "temperature is 0: all sequences would be the same")
    known = f"{len(spec.output_prefix)} tokens"
    require(count == 1 or not spec.output_prefix, "output_prefix", known, "goes with one sequence alone")


def _check_beam(spec: Spec, beam: Beam, limits: Limits) -> None:
    """Checks the parameters beside a beam search.

    It goes by the logprobs of the model alone, and has no text to search for stop strings before its end.
    """
    sampling, stopping = spec.sampling, spec.stopping
    name, most = "sampling.beam_search.width", min(limits.request.beam_width, limits.sequences, limits.vocabulary // 2)
    require(not limits.logits_processors, name, beam.width, "does not go with the server's logits processors")
    require(beam.width <= most, name, beam.width, f"must be in [1, {most}]")
    count = sampling.sequence_count
    require(beam.width >= count, name, beam.width, f"must be at least sampling.sequence_count, which is {count}")
    drawn = (entry for entry in parameters_of(Sampling) if entry.name != "sequence_count")
    for field_name, value, neutral in (
        *((entry.path, getattr(sampling, entry.name), entry.neutral) for entry in drawn),
        ("stopping.stop", stopping.stop, ()),
        ("stopping.min_tokens", stopping.min_tokens, 0),
        ("output_prefix", spec.output_prefix, ()),
    ):
        require(value is None or value == neutral, field_name, value, "does not go with sampling.beam_search")


def _values_in_force(sampling: Sampling, defaults: ModelDefaults, minted_seed: int) -> dict[str, Any]:
    """Returns the values of controls: the request's, else the model's, else the one that changes nothing."""
    values = {}
    for entry in parameters_of(Sampling):
        if entry.control:
            value = getattr(sampling, entry.name)
            values[entry.control] = getattr(defaults, entry.name, entry.neutral) if value is None else value
    if sampling.seed is None:
        values["seed"] = minted_seed
    return values


def _logits_params(
    spec: Spec,
    values: Mapping[str, Any],
    stop_ids: tuple[int, ...],
    limits: Limits,
    bad_words: Sequence[Sequence[int]],
    grammar: str,
) -> LogitsParams:
    sampling, least, most = spec.sampling, spec.stopping.min_tokens, limits.request.bad_word_tokens
    size = sum(map(len, bad_words))
    require(size <= most, "sampling.bad_words", f"{size} tokens", f"at most {most} in all their ways of writing")
    return LogitsParams(
        allowed=tuple(dict.fromkeys(sampling.allowed_token_ids)),
        banned=tuple(dict.fromkeys(map(tuple, filter(None, bad_words)))),
        not_yet=stop_ids if least else (),
        min_tokens=least if stop_ids else 0,
        bias=sampling.logit_bias,
        processors_args=sampling.logits_processors_args,
        grammar=grammar,
        grammar_salt=spec.sharing if grammar else "",
        grammar_stops=spec.stopping.stop_token_ids if grammar else (),
        **_of_class(LogitsParams, values),
    )


def _controls(spec: Spec, values: Mapping[str, Any], params: LogitsParams) -> Controls:
    output = spec.output
    return Controls(
        top_logprobs=output.top_logprobs if output.logprobs or output.top_logprobs else -1,
        logits_params=params,
        prompt_logprobs=output.prompt_logprobs,
        **_of_class(Controls, values),
    )


def _of_class(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the values that are fields of a dataclass."""
    return {one.name: values[one.name] for one in fields(kind) if one.name in values}
