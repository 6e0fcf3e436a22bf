"""Requests of one stream that are in a server at once: a drawn order of comings and goings keeps to both limits."""

import asyncio
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from rpc.services.inference.room import Room

REQUESTS, BYTES = 3, 10


@given(st.lists(st.integers(0, 14), max_size=30), st.randoms())
async def test_a_stream_holds_what_fits_and_all_of_it_comes_in(sizes: list[int], random: object) -> None:
    room, inside, seen = Room(REQUESTS, BYTES), deque[int](), list[list[int]]()

    async def come() -> None:
        for size in sizes:
            await room.enter(size)
            inside.append(size)
            seen.append(list(inside))

    coming = asyncio.create_task(come())
    while not coming.done():
        await asyncio.sleep(0)
        if inside and random.random() < 0.5:  # type: ignore[attr-defined]
            room.leave(inside.popleft())
    assert len(seen) == len(sizes)
    assert all(len(held) <= REQUESTS and (sum(held) <= BYTES or len(held) == 1) for held in seen)
