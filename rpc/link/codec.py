"""Between what crosses an engine's wall (`scheduler.events`) and the link's messages.

Arrays are packed little-endian bytes: a step of 64 tokens costs a handful of copies, not 64 times anything.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray
from quire.engine.v1 import engine_service_pb2 as pb

from rpc.frontend.engine_client import EngineInfo
from scheduler.events import End, EndReason, EngineStats, Event, Finish, Logprobs, Start, StepOutputs, Submit
from scheduler.request import Controls, Limits, Request
from scheduler.settings import RequestLimits

REASON_OF: dict[int, EndReason] = {pb.EndReason.Value(f"END_REASON_{reason.name}"): reason for reason in EndReason}
STATS = tuple(field.name for field in pb.Stats.DESCRIPTOR.fields)
CONTROLS = tuple(field.name for field in pb.Controls.DESCRIPTOR.fields)

INT32, INT64, FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


class LinkError(ValueError):
    """A message that no Quire of this version sends."""


def _packed(array: NDArray, dtype: DTypeLike) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _unpacked(data: bytes, dtype: np.dtype, count: int | None, name: str) -> NDArray:
    """count: how many elements there must be, if that is known. The array is read-only."""
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        raise LinkError(f"{name} has {len(data)} bytes, {count if count is not None else 'n'} x {dtype} are due")
    return np.frombuffer(data, dtype)


def encode_events(events: Sequence[Event]) -> pb.ConnectRequest:
    return pb.ConnectRequest(
        submits=[_encode_submit(event) for event in events if isinstance(event, Submit)],
        finishes=[event.attempt for event in events if isinstance(event, Finish)],
    )


def _encode_submit(event: Submit) -> pb.Submit:
    request = event.request
    return pb.Submit(
        attempt=event.attempt,
        prompt=_packed(request.prompt, INT32),
        emitted=_packed(np.array(event.emitted, INT32), INT32),
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
        controls=pb.Controls(**{name: getattr(request.controls, name) for name in CONTROLS}),
        patience=request.patience,
    )


def decode_events(message: pb.ConnectRequest) -> list[Event]:
    """Raises LinkError."""
    submits: list[Event] = [_decode_submit(submit) for submit in message.submits]
    return submits + [Finish(attempt) for attempt in message.finishes]


def _decode_submit(message: pb.Submit) -> Submit:
    request = Request(
        prompt=_unpacked(message.prompt, INT32, None, "prompt"),
        max_tokens=message.max_tokens,
        stop_ids=tuple(message.stop_ids),
        controls=Controls(**{name: getattr(message.controls, name) for name in CONTROLS}),
        patience=message.patience if message.HasField("patience") else None,
    )
    if not len(request.prompt):
        raise LinkError(f"attempt {message.attempt} has no prompt")
    return Submit(message.attempt, request, tuple(_unpacked(message.emitted, INT32, None, "emitted").tolist()))


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
        )
    )


def decode_info(message: pb.EngineInfo, request: RequestLimits) -> EngineInfo:
    """request: the frontend's own part of the limits."""
    limits = Limits(message.vocabulary, message.context, message.pool_tokens, message.sequences, request)
    return EngineInfo(limits, message.pages, message.dtype, message.device)


def encode_outputs(outputs: StepOutputs, stalled: float) -> pb.ConnectResponse:
    """stalled: seconds since the engine last made progress, 0 without work."""
    logprobs = outputs.logprobs
    return pb.ConnectResponse(
        stalled=stalled,
        outputs=pb.Outputs(
            attempts=_packed(outputs.attempts, INT64),
            positions=_packed(outputs.positions, INT32),
            tokens=_packed(outputs.tokens, INT32),
            chosen=_packed(logprobs.chosen, FLOAT32),
            rank=_packed(logprobs.rank, INT32),
            alternatives=logprobs.top_ids.shape[1],
            top_ids=_packed(logprobs.top_ids, INT32),
            top=_packed(logprobs.top, FLOAT32),
            starts=[pb.Start(attempt=start.attempt, waited=start.waited) for start in outputs.starts],
            ends=[_encode_end(end) for end in outputs.ends],
            stats=pb.Stats(**{name: getattr(outputs.stats, name) for name in STATS}),
            step_seconds=outputs.step_seconds,
        ),
    )


def _encode_end(end: End) -> pb.End:
    return pb.End(
        attempt=end.attempt,
        reason=f"END_REASON_{end.reason.name}",
        stop_token_id=end.stop_token_id,
        message=end.message,
        retry_after=end.retry_after,
    )


def decode_outputs(message: pb.Outputs) -> StepOutputs:
    """Raises LinkError."""
    attempts = _unpacked(message.attempts, INT64, None, "attempts")
    n, k = len(attempts), message.alternatives
    return StepOutputs(
        attempts=attempts,
        positions=_unpacked(message.positions, INT32, n, "positions"),
        tokens=_unpacked(message.tokens, INT32, n, "tokens"),
        logprobs=Logprobs(
            chosen=_unpacked(message.chosen, FLOAT32, n, "chosen"),
            rank=_unpacked(message.rank, INT32, n, "rank"),
            top_ids=_unpacked(message.top_ids, INT32, n * k, "top_ids").reshape(n, k),
            top=_unpacked(message.top, FLOAT32, n * k, "top").reshape(n, k),
        ),
        starts=tuple(Start(start.attempt, start.waited) for start in message.starts),
        ends=tuple(_decode_end(end) for end in message.ends),
        stats=EngineStats(**{name: getattr(message.stats, name) for name in STATS}),
        step_seconds=tuple(message.step_seconds),
    )


def _decode_end(message: pb.End) -> End:
    if message.reason not in REASON_OF:
        raise LinkError(f"attempt {message.attempt} ended for the unknown reason {message.reason}")
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    return End(message.attempt, REASON_OF[message.reason], stop, message.message, message.retry_after)
