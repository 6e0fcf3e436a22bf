"""A rotary embedding of several axes, which the product has none of yet."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.decoder import Decoder
from model.forward import CosSin
from model.rope import Rope


class Sectioned(Rope):
    """Pairs that turn by several axes in turn (M-RoPE, Wang et al., Qwen2-VL, 2024)."""

    def at(self, positions: Tensor) -> CosSin:
        cos, sin = self.tables
        pair = torch.arange(cos.shape[1])
        turned = positions[1 + pair % (len(positions) - 1)].T  # axis 0 is the position in the sequence
        return cos[turned, pair].unsqueeze(1), sin[turned, pair].unsqueeze(1)


def sectioned(decoder: Decoder) -> Decoder:
    """The same decoder, its tables read by several axes."""
    made: dict[int, Rope] = {}

    def changed(rope: Rope) -> Rope:
        if id(rope) not in made:
            other = Sectioned.__new__(Sectioned)
            other.__dict__.update(rope.__dict__)
            made[id(rope)] = other
        return made[id(rope)]

    layers: list[Any] = list(decoder.layers)
    return replace(
        decoder,
        layers=[replace(one, attention=replace(one.attention, rope=changed(one.attention.rope))) for one in layers],
    )
