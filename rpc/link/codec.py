"""Converts events and step outputs (`scheduler.events`) to the link's messages, and back.

Arrays are packed little-endian bytes: a step of 64 tokens costs a handful of copies, not 64 times anything.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.block_hash import Scope
from rpc.frontend.engine_client import EngineInfo
from rpc.link.arrays import FLOAT32, INT32, INT64, UINT8, LinkError, packed, unpacked
from rpc.link.page_maps import decode_answer, encode_answer
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.events import (
    SHORT_HASH,
    Abort,
    AdminQuery,
    AdminQuestion,
    End,
    EndReason,
    EngineStats,
    Event,
    KVEvents,
    KVSource,
    Logprobs,
    PromptPart,
    Start,
    StepOutputs,
    Submit,
)
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.parameters import Beam
from scheduler.request import PromptImage, Request
from scheduler.settings import RequestLimits

REASON_OF: dict[int, EndReason] = {pb.EndReason.Value(f"END_REASON_{reason.name}"): reason for reason in EndReason}
QUESTION_OF: dict[int, AdminQuestion] = {pb.Question.Value(f"QUESTION_{q.name}"): q for q in AdminQuestion}
STATS = tuple(field.name for field in pb.Stats.DESCRIPTOR.fields)
CONTROLS = tuple(field.name for field in pb.Controls.DESCRIPTOR.fields if field.name != "logits_params")
LOGITS_PARAMS = tuple(
    f.name for f in pb.LogitsParams.DESCRIPTOR.fields if f.name not in ("banned", "biased", "biases", "processors_args")
)
ID_LISTS = ("allowed", "not_yet", "reasoning_begin", "reasoning_end", "grammar_stops")


def encode_events(events: Sequence[Event]) -> pb.ConnectRequest:
    return pb.ConnectRequest(
        submits=[_encode_submit(event) for event in events if isinstance(event, Submit)],
        aborts=[pb.Abort(attempt=e.attempt, index=e.index) for e in events if isinstance(e, Abort)],
        asks=[
            pb.Ask(ticket=event.ticket, question=f"QUESTION_{event.question.name}")
            for event in events
            if isinstance(event, AdminQuery)
        ],
    )


def _encode_submit(event: Submit) -> pb.Submit:
    request, beam, source = event.request, event.request.beam, event.source
    return pb.Submit(
        attempt=event.attempt,
        prompt=packed(request.prompt, INT32),
        emitted=[
            pb.Emitted(ended=True) if tokens is None else pb.Emitted(tokens=packed(np.array(tokens, INT32), INT32))
            for tokens in event.emitted
        ],
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
        controls=_encode_controls(request.controls),
        queue_timeout=request.queue_timeout,
        tenant=request.scope.tenant,
        cache_salt=request.scope.salt,
        public_tokens=request.scope.public,
        count=request.count,
        images=[_encode_image(image) for image in request.images],
        bidirectional=request.scope.bidirectional,
        beam=None if beam is None else pb.Beam(width=beam.width, length_penalty=beam.length_penalty),
        priority=request.priority,
        deadline=request.deadline,
        again=event.again,
        isolated_steps=event.isolated_steps,
        source=None if source is None else pb.Source(address=source.address, token=source.token),
    )


def _encode_controls(controls: Controls) -> pb.Controls:
    message = pb.Controls(**{name: getattr(controls, name) for name in CONTROLS})
    if (wanted := controls.logits_params) != NO_LOGITS_PARAMS:
        message.logits_params.CopyFrom(
            pb.LogitsParams(
                banned=[pb.Tokens(ids=ids) for ids in wanted.banned],
                biased=[token for token, _ in wanted.bias],
                biases=[bias for _, bias in wanted.bias],
                processors_args=[pb.ProcessorArgs(name=name, args=args) for name, args in wanted.processors_args],
                **{name: getattr(wanted, name) for name in LOGITS_PARAMS},
            )
        )
    return message


def _decode_controls(message: pb.Controls) -> Controls:
    """Raises LinkError."""
    plain = Controls(**{name: getattr(message, name) for name in CONTROLS})
    if not message.HasField("logits_params"):
        return plain
    wanted = message.logits_params
    if len(wanted.biased) != len(wanted.biases) or not all(tokens.ids for tokens in wanted.banned):
        raise LinkError("logits params have other numbers of biased tokens and of biases, or an empty ban")
    values: dict[str, Any] = {name: getattr(wanted, name) for name in LOGITS_PARAMS}
    values |= {name: tuple(values[name]) for name in ID_LISTS}
    params = LogitsParams(
        banned=tuple(tuple(tokens.ids) for tokens in wanted.banned),
        bias=tuple(zip(wanted.biased, wanted.biases, strict=True)),
        processors_args=tuple((one.name, one.args) for one in wanted.processors_args),
        **values,
    )
    return replace(plain, logits_params=params)


def decode_events(message: pb.ConnectRequest) -> list[Event]:
    """Raises LinkError."""
    try:
        submits: list[Event] = [_decode_submit(submit) for submit in message.submits]
    except InvalidRequest as error:
        raise LinkError(str(error)) from None
    aborts = [Abort(a.attempt, a.index if a.HasField("index") else None) for a in message.aborts]
    return [*submits, *aborts, *(_decode_ask(ask) for ask in message.asks)]


def _decode_ask(message: pb.Ask) -> AdminQuery:
    if message.question not in QUESTION_OF:
        raise LinkError(f"question {message.question} is unknown")
    return AdminQuery(message.ticket, QUESTION_OF[message.question])


def _encode_image(image: PromptImage) -> pb.Image:
    return pb.Image(
        pixels=packed(image.pixels, UINT8),
        shape=image.pixels.shape,
        digest=image.digest,
        places=packed(image.places, INT32),
        grid=image.grid,
        positions=b"" if image.positions is None else packed(image.positions, INT32),
    )


def _decode_image(message: pb.Image) -> PromptImage:
    """Raises LinkError."""
    shape, grid = tuple(message.shape), tuple(message.grid)
    places = unpacked(message.places, INT32, None, "places")
    if len(shape) != 4 or not len(places) or not grid or math.prod(grid) != len(places):
        raise LinkError(f"an image has the shape {shape}, the grid {grid} and {len(places)} places")
    pixels = unpacked(message.pixels, UINT8, math.prod(shape), "pixels")
    positions = _decode_positions(message.positions, len(places)) if message.positions else None
    return PromptImage(pixels.reshape(shape), message.digest, places, grid, positions)


def _decode_positions(content: bytes, features: int) -> NDArray[np.int32]:
    """Returns [axes, features] int32. Raises LinkError."""
    positions = unpacked(content, INT32, None, "positions")
    # An image takes no more positions than placeholders, so no angle is looked up past the context.
    if len(positions) % features or positions.min() < 0 or positions.max() >= features:
        raise LinkError(f"an image of {features} features has {len(positions)} positions, or some out of range")
    return positions.reshape(-1, features)


def _decode_submit(message: pb.Submit) -> Submit:
    images = tuple(_decode_image(image) for image in message.images)
    request = Request(
        prompt=unpacked(message.prompt, INT32, None, "prompt"),
        max_tokens=message.max_tokens,
        stop_ids=tuple(message.stop_ids),
        controls=_decode_controls(message.controls),
        queue_timeout=message.queue_timeout if message.HasField("queue_timeout") else None,
        scope=Scope(
            message.tenant,
            message.cache_salt,
            message.public_tokens,
            tuple(image.span for image in images),
            message.bidirectional,
        ),
        images=images,
        count=message.count,
        beam=Beam(message.beam.width, message.beam.length_penalty) if message.HasField("beam") else None,
        priority=message.priority,
        deadline=message.deadline if message.HasField("deadline") else None,
    )
    if not len(request.prompt):
        raise LinkError(f"attempt {message.attempt} has no prompt")
    if not request.count or len(message.emitted) not in (0, request.count):
        raise LinkError(f"attempt {message.attempt} has {request.count} sequences, output of {len(message.emitted)}")
    emitted = tuple(_decode_emitted(emitted) for emitted in message.emitted)
    source = KVSource(message.source.address, message.source.token) if message.HasField("source") else None
    return Submit(message.attempt, request, emitted, message.again, message.isolated_steps, source)


def _decode_emitted(message: pb.Emitted) -> tuple[int, ...] | None:
    return None if message.ended else tuple(unpacked(message.tokens, INT32, None, "emitted").tolist())


def encode_info(info: EngineInfo) -> pb.ConnectResponse:
    limits = info.limits
    return pb.ConnectResponse(
        info=pb.EngineInfo(
            vocabulary=limits.vocabulary,
            context=limits.context,
            pool_tokens=limits.pool_tokens,
            sequences=limits.sequences,
            pages=info.pages,
            dtype=info.dtype,
            device=info.device,
            page_size=info.page_size,
            numerics=info.numerics,
            metrics=info.metrics,
            logits_processors=limits.logits_processors,
            structured_output=limits.structured_output,
        )
    )


def decode_info(message: pb.EngineInfo, request: RequestLimits) -> EngineInfo:
    """Returns the engine's properties. request: the frontend's own part of the limits."""
    limits = Limits(
        message.vocabulary,
        message.context,
        message.pool_tokens,
        message.sequences,
        request,
        tuple(message.logits_processors),
        message.structured_output,
    )
    return EngineInfo(
        limits, message.pages, message.dtype, message.device, message.page_size, message.numerics, message.metrics
    )


def encode_outputs(outputs: StepOutputs, stalled: float, overdue: str = "") -> pb.ConnectResponse:
    """Returns the message of a step's outputs.

    Args:
        outputs: Outputs of the step.
        stalled: Seconds since the engine last made progress, 0 without work.
        overdue: Description of a step that hangs, as in `EngineClient`.
    """
    return pb.ConnectResponse(
        stalled=stalled,
        overdue=overdue,
        outputs=pb.Outputs(
            attempts=packed(outputs.attempts, INT64),
            indices=packed(outputs.indices, INT32) if outputs.indices.any() else b"",
            positions=packed(outputs.positions, INT32),
            tokens=packed(outputs.tokens, INT32),
            **_encode_logprobs(outputs.logprobs),
            starts=[pb.Start(attempt=start.attempt, age=start.age, cached=start.cached) for start in outputs.starts],
            ends=[_encode_end(end) for end in outputs.ends],
            stats=pb.Stats(**{name: getattr(outputs.stats, name) for name in STATS}),
            step_seconds=outputs.step_seconds,
            overheads=outputs.overheads,
            kv_events=[pb.KVEvents(removed=change.removed, added=change.added) for change in outputs.kv_events],
            answers=[encode_answer(answer) for answer in outputs.answers],
            prompt_parts=[
                pb.PromptPart(attempt=part.attempt, start=part.start, **_encode_logprobs(part.logprobs))
                for part in outputs.prompt_parts
            ],
        ),
    )


def _encode_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """Returns the fields that Outputs and PromptPart have for logprobs."""
    return {
        "chosen": packed(logprobs.chosen, FLOAT32),
        "rank": packed(logprobs.rank, INT32),
        "alternatives": logprobs.top_ids.shape[1],
        "top_ids": packed(logprobs.top_ids, INT32),
        "top": packed(logprobs.top, FLOAT32),
    }


def _decode_logprobs(message: pb.Outputs | pb.PromptPart, n: int) -> Logprobs:
    """Raises LinkError."""
    k = message.alternatives
    return Logprobs(
        chosen=unpacked(message.chosen, FLOAT32, n, "chosen"),
        rank=unpacked(message.rank, INT32, n, "rank"),
        top_ids=unpacked(message.top_ids, INT32, n * k, "top_ids").reshape(n, k),
        top=unpacked(message.top, FLOAT32, n * k, "top").reshape(n, k),
    )


def _decode_part(message: pb.PromptPart) -> PromptPart:
    n = len(unpacked(message.chosen, FLOAT32, None, "chosen"))
    return PromptPart(message.attempt, message.start, _decode_logprobs(message, n))


def _encode_end(end: End) -> pb.End:
    return pb.End(
        attempt=end.attempt,
        reason=f"END_REASON_{end.reason.name}",
        stop_token_id=end.stop_token_id,
        message=end.message,
        retry_after=end.retry_after,
        index=end.index,
        more=end.more,
    )


def decode_outputs(message: pb.Outputs) -> StepOutputs:
    """Raises LinkError."""
    attempts = unpacked(message.attempts, INT64, None, "attempts")
    n = len(attempts)
    return StepOutputs(
        attempts=attempts,
        indices=unpacked(message.indices, INT32, n, "indices") if message.indices else np.zeros(n, np.int32),
        positions=unpacked(message.positions, INT32, n, "positions"),
        tokens=unpacked(message.tokens, INT32, n, "tokens"),
        logprobs=_decode_logprobs(message, n),
        starts=tuple(Start(start.attempt, start.age, start.cached) for start in message.starts),
        ends=tuple(_decode_end(end) for end in message.ends),
        stats=_decode_stats(message.stats),
        step_seconds=tuple(message.step_seconds),
        overheads=tuple(message.overheads),
        answers=tuple(decode_answer(answer) for answer in message.answers),
        prompt_parts=tuple(_decode_part(part) for part in message.prompt_parts),
        kv_events=tuple(_decode_kv_events(change) for change in message.kv_events),
    )


def _decode_kv_events(message: pb.KVEvents) -> KVEvents:
    """Raises LinkError."""
    for name, value in (("removed", message.removed), ("added", message.added)):
        if len(value) % SHORT_HASH:
            raise LinkError(f"{name} has {len(value)} bytes, hashes have {SHORT_HASH} each")
    return KVEvents(message.removed, message.added)


def _decode_stats(message: pb.Stats) -> EngineStats:
    values = {name: getattr(message, name) for name in STATS}
    return EngineStats(**{**values, "lifetimes": tuple(message.lifetimes)})


def _decode_end(message: pb.End) -> End:
    if message.reason not in REASON_OF:
        raise LinkError(f"attempt {message.attempt} ended for the unknown reason {message.reason}")
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    reason, text, retry_after = REASON_OF[message.reason], message.message, message.retry_after
    return End(message.attempt, reason, stop, text, retry_after, message.index, message.more)
