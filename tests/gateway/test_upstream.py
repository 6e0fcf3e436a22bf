"""Streams of several prompts as one, and texts of single tokens."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from rpc.gateway.served import ServedModels
from rpc.gateway.upstream import merged


async def counting(count: int, closed: list[int], fails: bool = False, pause: float = 0.0) -> AsyncGenerator[int, None]:
    try:
        for i in range(count):
            await asyncio.sleep(pause)
            yield i
        if fails:
            raise ValueError("it fails")
    finally:
        closed.append(count)


async def read(*streams: AsyncGenerator[int, None], most: int = 10**6) -> list[tuple[int, int]]:
    came = []
    async for item in merged(streams):
        came.append(item)
        if len(came) == most:
            break
    return came


@pytest.mark.parametrize("count", [1, 2, 5])
def test_everything_comes_in_the_order_of_its_stream(count: int) -> None:
    closed: list[int] = []
    came = asyncio.run(read(*(counting(10 + i, closed) for i in range(count))))
    for number in range(count):
        assert [item for which, item in came if which == number] == list(range(10 + number))
    assert len(closed) == count


@pytest.mark.parametrize("others", [0, 2])
async def test_one_that_fails_ends_all(others: int) -> None:
    closed: list[int] = []

    with pytest.raises(ValueError, match="it fails"):
        await read(counting(1, closed, fails=True), *(counting(10**9, closed, pause=0.001) for _ in range(others)))
    assert len(closed) == 1 + others


async def test_who_leaves_closes_all() -> None:
    closed: list[int] = []

    streams = merged([counting(10**9, closed), counting(10**8, closed)])
    async for _ in streams:
        break
    await streams.aclose()
    assert sorted(closed) == [10**8, 10**9]


async def test_one_that_is_cancelled_ends_all() -> None:
    async def cancelled() -> AsyncGenerator[int, None]:
        yield 1
        raise asyncio.CancelledError

    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await read(cancelled(), counting(10**9, [], pause=0.001))


def test_what_comes_costs_no_look_at_the_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`asyncio.wait` asks each of its tasks to wake it."""
    monkeypatch.setattr(asyncio, "wait", None)
    assert len(asyncio.run(read(*(counting(10, []) for _ in range(20))))) == 200


PIECES = {1: " a", 2: "b", 3: "\ufffd", 4: "", 5: " ", 6: " aa", 7: "éé"}


class Decoder:
    """A tokenizer that leaves out the space that a text begins with. asked: how often it was."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, stub: object, method: str, request: object, metadata: object) -> object:
        self.asked += 1
        text = "".join(PIECES[token] for token in request.token_ids)
        return type("Answer", (), {"text": text.removeprefix(" ")})


async def test_texts_are_those_in_the_middle_of_a_text() -> None:
    decoder = Decoder()
    served = ServedModels(decoder)

    for _ in range(2):
        assert await served.texts([*PIECES, 1], "m", None, ()) == PIECES
    assert decoder.asked == len(PIECES) + 1  # once more for what is no character
    await served.texts([1], "other", None, ())
    assert decoder.asked == len(PIECES) + 2
