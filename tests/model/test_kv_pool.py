"""The bytes of the KV pool: what is read is what was written, in every dtype; 8-bit KV loses little and never moves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cache_manager.layout import KVLayout
from model.config import KV_BYTES, read_config
from model.kv_pool import EIGHT_BIT
from model.reference.row_pool import RowPool
from model.settings import KV_DTYPES, ModelSettings
from scheduler.parameters import Sampling, Stopping
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.engines import make_request, make_rig
from tests.support.pages import sizes_of

CPU = torch.device("cpu")
WORST = {"int8": 0.5 / 127, "fp8": 1 / 16}  # of the largest magnitude; fp8 has 3 bits of mantissa: of each element


def pool_of(dtype: str, pages: int) -> RowPool:
    layout = KVLayout.uniform(((0, 1),), kv_heads=3, head_dim=8, page_size=4, **sizes_of(dtype))
    return RowPool(layout, pages, dtype, CPU)


def random_kv(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((tokens, 3, 8), generator=made) * 10 ** torch.randn((), generator=made) for _ in "kv")
    return keys, values


def written(dtype: str, seed: int = 0) -> tuple[RowPool, torch.Tensor, torch.Tensor, torch.Tensor]:
    pool, (keys, values) = pool_of(dtype, 5), random_kv(9, seed)
    slots = pool.places(0, np.array([3, 19, 4, 0, 7, 12, 13, 1, 18]))
    pool.write(1, slots, keys, values)
    return pool, slots, keys, values


def test_every_dtype_that_can_be_asked_for_has_a_size_and_a_pool() -> None:
    assert set(KV_DTYPES) - {"auto"} == set(KV_BYTES)
    for dtype in KV_BYTES:
        pool_of(dtype, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_read_is_what_was_written(dtype: str) -> None:
    pool, slots, keys, values = written(dtype)
    read = pool.read(1, slots)
    for part, source in zip(read, (keys, values), strict=True):
        assert part.dtype is torch.float32
        assert torch.equal(part, source.to(getattr(torch, dtype)).float().transpose(0, 1))
    assert not torch.cat(pool.read(0, slots)).any(), "another layer's pages were written"


@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("seed", range(4))
def test_eight_bits_are_as_near_as_their_format_allows(dtype: str, seed: int) -> None:
    pool, slots, keys, values = written(dtype, seed)
    for part, source in zip(pool.read(1, slots), (keys, values), strict=True):
        exact = source.transpose(0, 1)
        largest = exact.abs().amax(-1, keepdim=True)
        allowed = largest * WORST["int8"] if dtype == "int8" else exact.abs() * WORST["fp8"] + largest / 448 / 2
        assert ((part - exact).abs() <= allowed * 1.0001).all()
        assert torch.equal(part.abs().amax(-1, keepdim=True) > 0, largest > 0)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_a_token_is_stored_the_same_whatever_is_written_beside_it(dtype: str) -> None:
    keys, values = random_kv(6)
    together, alone = pool_of(dtype, 2), pool_of(dtype, 2)
    slots = together.places(0, np.arange(6))
    together.write(0, slots, keys * 1.0, values)
    for i in range(6):
        alone.write(0, slots[i : i + 1], keys[i : i + 1], values[i : i + 1])
    alone.write(0, alone.places(0, np.array([7])), 1000 * keys[:1], values[:1])  # later, larger ones scale nothing anew
    for one, other in zip(together.read(0, slots), alone.read(0, slots), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_zeros_are_zeros_and_what_is_not_finite_stays_so(dtype: str) -> None:
    pool = pool_of(dtype, 1)
    keys, values = torch.zeros((2, 3, 8)), torch.ones((2, 3, 8))
    values[1, 0, 3] = torch.nan
    values[1, 1, 3] = torch.inf
    places = pool.places(0, np.array([0, 1]))
    pool.write(0, places, keys, values)
    read_keys, read_values = pool.read(0, places)
    assert torch.equal(read_keys, torch.zeros((3, 2, 8)))
    assert torch.equal(read_values[:, 0], torch.ones((3, 8)))
    assert not read_values[:2, 1].isfinite().all(-1).any()
    assert torch.equal(read_values[2, 1], torch.ones(8))


@pytest.mark.parametrize("dtype", KV_BYTES)
def test_copies_and_poison_touch_the_pages_that_they_name(dtype: str) -> None:
    pool, _, _, _ = written(dtype)
    everything = pool.places(0, np.arange(20))
    before = [part.clone() for layer in (0, 1) for part in pool.read(layer, everything)]
    pool.copy(np.array([[0, 2], [4, 1]], np.int32))
    pool.poison(np.array([3], np.int32))
    after = [part for layer in (0, 1) for part in pool.read(layer, everything)]
    for was, now in zip(before, after, strict=True):
        pages = was.view(3, 5, 4, 8)
        expected = torch.stack(
            (pages[:, 0], pages[:, 4], pages[:, 0], torch.full((3, 4, 8), torch.nan), pages[:, 4]), 1
        )
        assert torch.equal(now.nan_to_num(-9), expected.reshape(3, 20, 8).nan_to_num(-9))


def test_eight_bits_hold_nearly_twice_the_tokens() -> None:
    config = read_config(Path("model/demo/checkpoint"))
    sixteen, eight = (config.kv_layout(16, dtype).token_bytes for dtype in ("bfloat16", "int8"))
    assert eight == config.layers * 2 * config.kv_heads * (config.head_dim + 4)
    assert eight < 0.6 * sixteen


def test_a_dtype_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype is 'int4', must be one of auto"):
        ModelSettings(kv_cache_dtype="int4")


NARROW = SchedulerSettings(max_sequences=8, max_batched_tokens=27, prefill_chunk=13, steps_in_flight=2)


@pytest.mark.parametrize("kv", EIGHT_BIT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.sample(2)
def test_no_schedule_changes_a_bit(kv: str, dtype: str, backend: str, tiny: Path) -> None:
    """At once with pages of 16, in chunks under preemption with pages of 7, one after the other with pages of 1."""
    prompts = random_prompts([40, 3, 33, 16, 1, 71], seed=3)
    found = []
    for page_size, tokens, scheduling, together in (
        (16, 2048, SchedulerSettings(), True), (7, 112, NARROW, True), (1, 2048, SchedulerSettings(), False),
    ):  # fmt: skip
        rig = make_rig(
            tiny, page_size, tokens, scheduling, True, dtype=dtype, queue=ENDLESS, prefix_cache=False, backend=backend,
            kv_dtype=kv,
        )  # fmt: skip
        requests = {i: make_request(rig, prompt, 20) for i, prompt in enumerate(prompts)}
        for batch in [requests] if together else [{i: request} for i, request in requests.items()]:
            rig.run(batch)
        found.append([(rig.results[i].tokens, rig.logits_of(i)) for i in requests])
    assert found[0] == found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize("kv", EIGHT_BIT)
def test_kernels_give_the_tokens_of_the_reference(kv: str, tiny: Path) -> None:
    prompts = random_prompts([40, 3, 33], seed=3)
    found = []
    for backend in ("cpu", "reference"):
        rig = make_rig(tiny, dtype="float32", backend=backend, kv_dtype=kv, record_logits=True)
        rig.run({i: make_request(rig, prompt, 20) for i, prompt in enumerate(prompts)})
        found.append([rig.results[i].tokens for i in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("page_size", [1, 3])
def test_pages_of_any_size_are_exported(page_size: int) -> None:
    layout = KVLayout.uniform(((0,),), 3, 8, 1, page_size, 4)
    pool = RowPool(layout, 2, "int8", CPU)
    assert pool.export(np.array([1, 0], np.int32), np.zeros(2, np.int32)).shape == (2, layout.page_bytes)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_an_engine_with_eight_bit_kv_gives_the_same_tokens_from_the_prefix_cache(dtype: str) -> None:
    from rpc.offline import LLM

    prompt = "First Citizen: we are accounted poor citizens, the patricians good. " * 3
    with LLM("demo", kv_cache_dtype=dtype, kv_cache_memory=2**24) as llm:
        first, again = (llm.generate([prompt], Sampling(0.0), Stopping(max_tokens=12))[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens % 16) == (0, 0)
    assert again.cached_tokens > 0
    assert (first.token_ids, first.score) == (again.token_ids, again.score)
