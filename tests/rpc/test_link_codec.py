"""The link's messages arrive as they were, to the last bit and with every field; malformed ones are refused."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from itertools import count
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.block_hash import Scope
from rpc.frontend.engine_client import EngineInfo
from rpc.link import codec
from scheduler.controls import Controls, LogitsParams
from scheduler.events import Abort, AdminQuery, End, EndReason, EngineStats, Event, Logprobs, Start, StepOutputs, Submit
from scheduler.limits import Limits
from scheduler.request import PromptImage, Request
from scheduler.settings import RequestLimits
from tests.support.examples import examples
from tests.support.frontends import outputs
from tests.support.links import aborts, step_outputs, submit, submits, unlike

few = settings(max_examples=examples(100), deadline=None)
OWN_LIMITS = RequestLimits(stop_strings=7)


def through_events(events: list[Event]) -> list[Event]:
    return codec.decode_events(pb.ConnectRequest.FromString(codec.encode_events(events).SerializeToString()))


def through_outputs(step: StepOutputs, stalled: float = 0.0) -> tuple[StepOutputs, float]:
    message = pb.ConnectResponse.FromString(codec.encode_outputs(step, stalled).SerializeToString())
    return codec.decode_outputs(message.outputs), message.stalled


def through_info(info: EngineInfo) -> EngineInfo:
    message = pb.ConnectResponse.FromString(codec.encode_info(info).SerializeToString())
    return codec.decode_info(message.info, OWN_LIMITS)


@few
@given(st.lists(submits() | aborts, max_size=5))
def test_events_arrive_as_they_were_submits_first(events: list[Event]) -> None:
    expected = [e for e in events if isinstance(e, Submit)] + [e for e in events if isinstance(e, Abort)]
    assert unlike(expected, through_events(events)) == []


@pytest.mark.parametrize("queue_timeout", [None, 0.0, 2.5])
def test_no_patience_is_not_the_queues_own(queue_timeout: float | None) -> None:
    event = submit(1, queue_timeout=queue_timeout)
    event = replace(event, request=replace(event.request, deadline=queue_timeout))
    assert unlike([event], through_events([event])) == []


@few
@given(step_outputs(), st.floats(min_value=0.0))
def test_outputs_arrive_as_they_were(step: StepOutputs, stalled: float) -> None:
    arrived, told = through_outputs(step, stalled)
    assert unlike(step, arrived) == []
    assert told == stalled


@few
@given(st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5), st.text(), st.text())
def test_info_arrives_with_the_frontends_own_request_limits(counts: list[int], dtype: str, device: str) -> None:
    info = EngineInfo(
        Limits(*counts[:4], OWN_LIMITS, (dtype, device)[: counts[4] % 3]),
        counts[4],
        dtype,
        device,
        counts[0],
        dtype.encode(),
        f"{device}:{counts[1]}",
    )
    assert unlike(info, through_info(info)) == []


@pytest.mark.parametrize("reason", EndReason)
@pytest.mark.parametrize("stop", [None, 0, 5])
def test_every_end_arrives(reason: EndReason, stop: int | None) -> None:
    end = End(2**40, reason, stop, "why", 1.5)
    assert through_outputs(outputs_with(ends=(end,)))[0].ends == (end,)


def outputs_with(**values: Any) -> StepOutputs:
    step = outputs([(1, 0, 70), (2, 0, 71)])
    return StepOutputs(**{f.name: values.get(f.name, getattr(step, f.name)) for f in fields(StepOutputs)})


BOUNDED = {"count": 2, "length_penalty": 2.5}
"""Values that are checked; there are as many sequences as there are outputs of such."""


def filled(kind: Any, numbers: count, name: str = "", instead: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """A value with something in every field that no default has. Fails for a kind of field that it does not know.

    instead: dataclasses that take the place of others.
    """
    number, kind = next(numbers), instead.get(kind, kind)
    if name == "least_priority":
        return -7  # none above 0 is one
    if kind is PromptImage:  # its fields are checked against one another
        places, positions = np.array([number, number + 1], np.int32), np.array([[1, 0], [0, 1], [1, 1]], np.int32)
        return PromptImage(np.full((1, 3, 1, 2), number % 256, np.uint8), b"%d" % number, places, (1, 2), positions)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{f.name: filled(hints[f.name], numbers, f.name, instead) for f in fields(kind)})
    if get_origin(kind) is tuple:
        one, *others = get_args(kind)
        kinds = [one, one] if others == [Ellipsis] else [one, *others]
        return tuple(filled(item, numbers, name, instead) for item in kinds)
    if get_origin(kind) is np.ndarray:
        shape = {"top_ids": (2, 3), "top": (2, 3), "pixels": (1, 3, 1, 2)}.get(name, (2,))
        return np.arange(number, number + np.prod(shape)).reshape(shape).astype(get_args(get_args(kind)[1])[0])
    if get_origin(kind) is Mapping:
        return {filled(key, numbers): filled(value, numbers) for key, value in [get_args(kind)]}
    if NoneType in get_args(kind):
        return filled(get_args(kind)[0], numbers, name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[number % len(kind)]
    if name in BOUNDED:
        return BOUNDED[name]
    if name in ("added", "removed"):
        return b"%08d" % number
    return {int: number, float: number + 0.5, str: f"text {number}", bytes: b"%d" % number, bool: True}[kind]


THROUGH: dict[type, Callable[[Any], Any]] = {
    Submit: lambda event: through_events([event])[0],
    Abort: lambda event: through_events([event])[0],
    AdminQuery: lambda event: through_events([event])[0],
    StepOutputs: lambda step: through_outputs(step)[0],
    EngineInfo: through_info,
}


# The limits of a request are the frontend's own; where its images stand follows from the images; pages come from the
# engine that had them.
NOT_CARRIED = ("it.limits.request.", "it.request.scope.images", "it.transferred")


def check_every_field_is_carried(kind: type, instead: Mapping[Any, Any] = MappingProxyType({})) -> None:
    value = filled(kind, count(2000), instead=instead)
    missed = unlike(value, THROUGH[kind](value))
    assert [path for path in missed if not path.startswith(NOT_CARRIED)] == []


@pytest.mark.parametrize("kind", THROUGH)
def test_every_field_is_carried(kind: type) -> None:
    check_every_field_is_carried(kind)


@pytest.mark.parametrize("kind", [Submit, StepOutputs, EngineInfo])
def test_no_field_of_a_filled_value_is_its_default(kind: type) -> None:
    """Else a field that is forgotten on both sides would not show."""

    def defaults(value: Any) -> list[str]:
        if isinstance(value, tuple):
            return [name for item in value for name in defaults(item)]
        if not is_dataclass(value):
            return []
        own = [
            f.name
            for f in fields(value)
            if f.default is not MISSING and np.array_equal(f.default, getattr(value, f.name))
        ]
        return own + [name for f in fields(value) for name in defaults(getattr(value, f.name))]

    assert defaults(filled(kind, count(2000))) == []


@pytest.mark.parametrize(
    ("kind", "carrier"),
    [
        (EngineStats, StepOutputs),
        (End, StepOutputs),
        (Start, StepOutputs),
        (Logprobs, StepOutputs),
        (StepOutputs, StepOutputs),
        (Request, Submit),
        (Controls, Submit),
        (LogitsParams, Submit),
        (Scope, Submit),
        (Limits, EngineInfo),
        (EngineInfo, EngineInfo),
    ],
)
def test_a_field_that_the_link_forgets_is_caught(monkeypatch: pytest.MonkeyPatch, kind: type, carrier: type) -> None:
    frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]  # a dataclass inherits from its like alone
    planted = [("planted", int, field(default=0))]
    grown = make_dataclass(kind.__name__, planted, bases=(kind,), frozen=frozen, slots=True)
    monkeypatch.setattr(codec, kind.__name__, grown)
    monkeypatch.setitem(THROUGH, grown, THROUGH.get(kind))
    with pytest.raises(AssertionError, match=r"planted: 2\d+ is not 0"):
        check_every_field_is_carried(grown if kind is carrier else carrier, {kind: grown})


def test_a_control_that_the_link_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CONTROLS", tuple(name for name in codec.CONTROLS if name != "top_logprobs"))
    with pytest.raises(AssertionError, match="top_logprobs"):
        check_every_field_is_carried(Submit)
    assert {f.name for f in fields(Controls)} == {f.name for f in pb.Controls.DESCRIPTOR.fields}


def malformed_outputs(**values: Any) -> pb.Outputs:
    message = codec.encode_outputs(outputs_with(), 0.0).outputs
    for name, value in values.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"attempts": bytes(15)}, "attempts has 15 bytes"),
        ({"attempts": bytes(24)}, "positions has 8 bytes, 3 x int32"),
        ({"positions": bytes(4)}, "positions has 4 bytes, 2 x int32"),
        ({"tokens": b""}, "tokens has 0 bytes"),
        ({"chosen": bytes(12)}, "chosen has 12 bytes"),
        ({"rank": bytes(7)}, "rank has 7 bytes"),
        ({"alternatives": 3}, "top_ids has 0 bytes, 6 x int32"),
        ({"top_ids": bytes(8)}, "top_ids has 8 bytes"),
        ({"alternatives": 1, "top_ids": bytes(8), "top": bytes(4)}, "top has 4 bytes, 2 x float32"),
    ],
)
def test_outputs_of_a_wrong_size_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(codec.LinkError, match=name):
        codec.decode_outputs(malformed_outputs(**values))


@pytest.mark.parametrize("reason", [pb.END_REASON_UNSPECIFIED, 99])
def test_an_end_for_an_unknown_reason_is_refused(reason: int) -> None:
    message = pb.Outputs(ends=[pb.End(attempt=7, reason=reason)])
    with pytest.raises(codec.LinkError, match=f"attempt 7 .* reason {reason}"):
        codec.decode_outputs(message)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"prompt": b""}, "attempt 7 has no prompt"),
        ({"prompt": bytes(6)}, "prompt has 6 bytes"),
        ({"emitted": [pb.Emitted(tokens=bytes(3))]}, "emitted has 3 bytes"),
        ({"emitted": [pb.Emitted(), pb.Emitted()]}, "attempt 7 has 1 sequences, output of 2"),
        ({"count": 0}, "attempt 7 has 0 sequences"),
    ],
)
def test_a_malformed_submit_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    message = codec.encode_events([submit(7)])
    for part in values:
        message.submits[0].ClearField(part)
    message.submits[0].MergeFrom(pb.Submit(**values))
    with pytest.raises(codec.LinkError, match=name):
        codec.decode_events(message)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"grid": []}, r"the grid \(\) and 2 places"),
        ({"grid": [1, 3]}, r"the grid \(1, 3\) and 2 places"),
        ({"places": b""}, r"the grid \(1, 2\) and 0 places"),
        ({"shape": [3, 1, 2]}, r"the shape \(3, 1, 2\)"),
        ({"pixels": bytes(5)}, "pixels has 5 bytes"),
        ({"positions": bytes(20)}, "2 features has 5 positions"),
        ({"positions": bytes(6)}, "positions has 6 bytes"),
        ({"positions": np.array([[0, 2]], "<i4").tobytes()}, "out of range"),
        ({"positions": np.array([[-1, 0]], "<i4").tobytes()}, "out of range"),
    ],
)
def test_a_malformed_image_is_refused(values: dict[str, Any], name: str) -> None:
    message = codec.encode_events([filled(Submit, count(2000))])
    for part in values:
        message.submits[0].images[0].ClearField(part)
    message.submits[0].images[0].MergeFrom(pb.Image(**values))
    with pytest.raises(codec.LinkError, match=name):
        codec.decode_events(message)


SIZES = st.sampled_from((0, 4, 8, 12, 16, 24, 3, 9)) | st.integers(0, 30)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(SIZES, min_size=7, max_size=7), st.sampled_from((0, 1, 2, 3, 2**31, 2**32 - 1)))
def test_outputs_of_any_sizes_are_read_or_refused(sizes: list[int], alternatives: int) -> None:
    names = ("attempts", "positions", "tokens", "chosen", "rank", "top_ids", "top")
    values = {name: bytes(size) for name, size in zip(names, sizes, strict=True)}
    try:
        step = codec.decode_outputs(pb.Outputs(alternatives=alternatives, **values))
    except codec.LinkError:
        return
    assert [len(a) for a in (step.positions, step.tokens, step.logprobs.rank)] == [len(step.attempts)] * 3
    assert step.logprobs.top.shape == (len(step.attempts), alternatives)
