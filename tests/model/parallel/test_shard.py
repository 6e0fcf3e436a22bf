"""Shards of a model: together they are all of it, and keys are with the queries that read them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.registry import build_model
from model.config import ModelConfig, read_config
from model.footprint import Shapes
from model.parallel.collective import Ranks
from model.parallel.shard import Shard
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format


def heads_of(config: ModelConfig, run: slice) -> list[int]:
    assert run.start % config.head_dim == run.stop % config.head_dim == 0
    return list(range(run.start // config.head_dim, run.stop // config.head_dim))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (12, 3, 3), (12, 3, 6), (8, 8, 4), (9, 3, 9)]
)
def test_every_rank_has_the_keys_of_its_queries(tiny: Path, heads: int, kv_heads: int, size: int) -> None:
    config = replace(read_config(tiny), heads=heads, kv_heads=kv_heads)
    shards = [Shard(rank, size) for rank in range(size)]
    assert [head for shard in shards for head in heads_of(config, shard.queries(config))] == list(range(heads))
    for shard in shards:
        shard.check(config)
        own, queries, keys = (
            shard.of(config),
            heads_of(config, shard.queries(config)),
            heads_of(config, shard.keys(config)),
        )
        assert (own.heads, own.kv_heads) == (len(queries), len(keys))
        shared = own.heads // own.kv_heads
        assert [keys[i // shared] for i in range(len(queries))] == [q // (heads // kv_heads) for q in queries]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "can"),
    [(9, 3, 4, "1, 3 or 9"), (4, 2, 3, "1, 2 or 4"), (12, 6, 4, "1, 2, 3, 6 or 12"), (1, 1, 2, "1")],
)
def test_what_cannot_be_divided_is_told_with_what_can(
    tiny: Path, heads: int, kv_heads: int, size: int, can: str
) -> None:
    config = replace(read_config(tiny), heads=heads, kv_heads=kv_heads)
    with pytest.raises(
        ValueError, match=f"--tensor-parallel is {size}: .* {heads} heads over {kv_heads} .*; {can} can be"
    ):
        Shard(0, size).check(config)


@given(st.integers(1, 2000), st.integers(1, 16))
def test_parts_are_all_columns_in_order(count: int, size: int) -> None:
    if count < size:
        with pytest.raises(ValueError, match="columns cannot be divided"):
            Shard(0, size).part(count)
        return
    parts = [Shard(rank, size).part(count) for rank in range(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    assert all(part.stop > part.start for part in parts)
    if count >= 32 * size:
        assert all(part.start % 32 == 0 for part in parts)


def held(config: ModelConfig, shard: Shard, quantization: str | None) -> int:
    """Bytes of the weights that a rank keeps."""
    weights = open_weight_format(config, quantization)
    tensors = Tensors(Shapes(), torch.float32, torch.device("meta"), weights, ranks=Ranks(shard))
    with torch.inference_mode():
        build_model(config, tensors)
    return tensors.held.bytes


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_rank_holds_no_more_than_its_part(tiny: Path, quantization: str | None) -> None:
    """All but the embedding, the norms and scales of sums is divided."""
    config = read_config(tiny)
    everywhere = 4 * config.hidden * (config.vocabulary + 2 * config.layers + 1)
    everywhere += 4 * config.hidden * 2 * config.layers * (quantization is not None)
    parts = [held(config, Shard(rank, 2), quantization) - everywhere for rank in range(2)]
    assert sum(parts) == held(config, Shard(), quantization) - everywhere
    assert 0.6 < parts[0] / parts[1] <= 1.0
