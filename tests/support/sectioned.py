"""A decoder whose rotary pairs turn by several axes in turn."""

from dataclasses import replace
from typing import Any

from model.decoder import Decoder
from model.rope import Rope

AXES = 3


def in_turn(rope: Rope) -> Rope:
    """The same table, whose pairs turn by the three axes in turn."""
    return rope.with_axes([pair % AXES for pair in range(rope.tables[0].shape[1])])


def sectioned(decoder: Decoder) -> Decoder:
    """The same decoder, its tables read by several axes."""
    made: dict[int, Rope] = {}

    def changed(rope: Rope) -> Rope:
        if id(rope) not in made:
            made[id(rope)] = in_turn(rope)
        return made[id(rope)]

    layers: list[Any] = list(decoder.layers)
    return replace(
        decoder,
        layers=[replace(one, attention=replace(one.attention, rope=changed(one.attention.rope))) for one in layers],
    )
