"""Bodies that are read from a client, and the JSON that they may be."""

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, strategies

from rpc.gateway.bodies import FEW_VALUES, MOST_VALUES, VALUE_BYTES, Bodies, ClientGone, parsed, value_count
from rpc.gateway.errors import ApiError
from rpc.gateway.settings import GatewaySettings

SETTINGS = GatewaySettings(max_body=2048, body_memory=3000, max_prompts=4, max_calls=6, read_time=0.2)
JSON = {"content-type": "application/json; charset=utf-8"}
Receive = Callable[[], Awaitable[dict[str, Any]]]


def receiving(*parts: bytes, then: dict[str, Any] | None = None) -> Receive:
    """then: what comes after them, where they are not all."""
    left = [{"type": "http.request", "body": part, "more_body": then is not None or i < len(parts) - 1}
            for i, part in enumerate(parts)]  # fmt: skip
    left += [] if then is None else [then]

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


async def read(bodies: Bodies, receive: Receive, headers: dict[str, str] = JSON) -> Any:
    with bodies.held() as body:
        return await bodies.read(body, headers, receive)


def refused(receive: Receive, headers: dict[str, str] = JSON) -> ApiError:
    with pytest.raises(ApiError) as error:
        asyncio.run(read(Bodies(SETTINGS), receive, headers))
    return error.value


def test_parts_are_one_body() -> None:
    assert asyncio.run(read(Bodies(SETTINGS), receiving(b'{"a"', b":[1", b"]}"))) == {"a": [1]}


def test_bounds() -> None:
    assert refused(receiving(b"{}"), {"content-type": "text/plain"}).status == 415
    assert refused(receiving(b"{}"), {}).status == 415
    assert refused(receiving(b"{}"), JSON | {"content-encoding": "gzip"}).status == 415
    never = receiving(then={"type": "never"})
    assert refused(never, JSON | {"content-length": "2049"}).status == 413
    assert refused(receiving(b" " * 2000, b" " * 2000)).status == 413
    assert refused(receiving(b"{", then={"type": "http.request", "more_body": True})).status == 408
    with pytest.raises(ClientGone):
        asyncio.run(read(Bodies(SETTINGS), receiving(b"{", then={"type": "http.disconnect"})))


async def test_memory_and_calls_are_given_back() -> None:
    bodies = Bodies(SETTINGS)

    with bodies.held() as first:
        await bodies.read(first, JSON, receiving(b"1" * 2000))
        bodies.admit(first, 4)
        with pytest.raises(ApiError) as full:
            await read(bodies, receiving(b" " * 2000))
        assert (full.value.status, full.value.retry_after) == (503, 1.0)
        with bodies.held() as second, pytest.raises(ApiError) as busy:
            bodies.admit(second, 3)
        assert busy.value.status == 503
        with bodies.held() as third, pytest.raises(ApiError) as many:
            bodies.admit(third, 5)
        assert (many.value.status, many.value.param) == (400, "prompt")
    for _ in range(3):
        with bodies.held() as again:
            assert await bodies.read(again, JSON, receiving(b" " * 2000 + b"1")) == 1
            bodies.admit(again, 4)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{} {}", b"[NaN]", b"[Infinity]", b"\xff\xfe", b'"\xc3"', b'["\\ud800"]', b"[" * 300 + b"]" * 300],
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parsed(data)
    assert error.value.status == 400
    assert "no JSON" in error.value.message


@pytest.mark.parametrize("nest", [b"[" * 100 + b"]" * 100, b'{"":' * 100 + b"1" + b"}" * 100, b","])
async def test_values_are_counted_before_they_are_made(nest: bytes) -> None:
    settings = GatewaySettings()
    bodies = Bodies(settings)
    few, many = nest * 10, nest * (MOST_VALUES // 100 + 1) if len(nest) > 1 else b"," * (MOST_VALUES + 1)

    with bodies.held() as body:
        with pytest.raises(ApiError, match="no JSON"):
            await bodies.read(body, JSON, receiving(few))
        assert body.taken == len(few) + VALUE_BYTES * sum(few.count(sign) for sign in (b",", b"[", b"{"))
    with bodies.held() as body, pytest.raises(ApiError, match="commas and brackets"):
        await bodies.read(body, JSON, receiving(many))


def test_a_body_that_never_fits_is_not_the_others_fault() -> None:
    assert refused(receiving(b"[" + b"1," * 20 + b"1]")).status == 413


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'["' + b"a, b [c] " * 5000 + b'"]', 1),
        (b'["' + b'\\", {' * 5000 + b'", 1]', 2),
        (b'{"a,": "' + b"\\\\" * 5000 + b'", "b": [' + b"1," * 5000 + b"1]}", 5003),
        (b'"' + b'\\",' * 5000, 0),  # without an end
        (b'"' + b",," * 5000 + b"\\", 0),
    ],
)
def test_commas_of_texts_are_no_values(text: bytes, values: int) -> None:
    assert value_count(text) == values


def test_many_empty_texts_are_counted_in_bounded_memory() -> None:
    body = b"," * MOST_VALUES + b'""' * 2**22
    tracemalloc.start()
    try:
        value_count(body)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 64 * 2**20 < 33 * 2**22, "a part for each pair of quotes takes more"
    with pytest.raises(ApiError, match="commas and brackets"):
        value_count(b'"",' * (3 * MOST_VALUES))


@given(strategies.recursive(strategies.text('a,[{"\\\\\n', max_size=6), lambda one: strategies.lists(one, max_size=4)))
def test_the_count_is_of_values_alone(value: Any) -> None:
    def values(one: Any) -> int:
        return 0 if isinstance(one, str | int) else 1 + max(0, len(one) - 1) + sum(map(values, one))

    filler = [0] * FEW_VALUES  # above, the count is exact
    assert value_count(json.dumps([value, filler]).encode()) == values([value, filler])
