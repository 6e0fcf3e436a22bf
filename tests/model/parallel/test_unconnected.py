"""Models without the other ranks: what they share with the whole ones, and the shapes of what they exchange."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from model.blocks import GatedMLP
from model.decoder import Decoder, Embedding
from model.embedding_table import PlainTable
from model.layers import Linear, RMSNorm, silu
from model.parallel.collective import Gathered, Summed
from model.parallel.norms import SharedGroup, TogetherOnRanks
from model.parallel.shard import Shard
from model.parallel.unconnected import Unconnected, unconnected
from tests.model.parallel.test_collectives import group, part_of, together


class Waiting(Unconnected):
    """Stands for a collective that waits for other ranks."""


def parts_of(part: Any) -> Iterator[Any]:
    yield part
    inner = part if isinstance(part, list | tuple) else []
    if is_dataclass(part):
        inner = [getattr(part, field.name) for field in fields(part)]
    for one in inner:
        yield from parts_of(one)


def test_no_part_waits_and_all_weights_are_the_same() -> None:
    waits, linear = Waiting(Shard(1, 2)), Linear(torch.ones(4, 4))
    whole, norm = GatedMLP(linear, linear, silu), RMSNorm(torch.ones(4), 1e-6)
    divided = GatedMLP(linear, Summed(linear, waits), silu)
    shared = TogetherOnRanks(norm, SharedGroup(0, 1, 0.5, waits))
    head = Gathered(linear, [4, 4], waits)
    decoder = Decoder(Embedding(PlainTable("", torch.ones(1, 4))), [whole, divided, shared], norm, head)  # type: ignore[list-item]
    made = unconnected(decoder)
    assert any(type(part) is Waiting for part in parts_of(decoder))
    assert not any(type(part) is Waiting for part in parts_of(made))
    assert made.layers[0] is whole
    assert made.norm is norm
    assert made.embedding is decoder.embedding
    assert sum(part is linear for part in parts_of(made)) == sum(part is linear for part in parts_of(decoder)) == 5
    assert unconnected(made.layers[0]) is whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_shapes_of_those_with_the_others(dtype: torch.dtype) -> None:
    widths = [32, 7, 40]

    def do(rank: int, one: Any) -> list[torch.Tensor]:
        x = part_of(rank, 0, 5, 16, dtype)
        return [one.sum(x), one.all_gather(x), one.gather(part_of(rank, 0, 5, widths[rank], dtype), widths)]

    with group("gloo", 3) as members:
        made = together(members, do)
    for rank, results in enumerate(made):
        alone = do(rank, Unconnected(Shard(rank, 3)))
        assert [(one.shape, one.dtype) for one in alone] == [(one.shape, one.dtype) for one in results]
