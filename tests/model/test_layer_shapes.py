"""Layers whose KV differ in shape share one pool: tokens and bits are as if each layer had memory of its own.

The model is one of this test: Ministral with one wide KV head in some layers, with windows in the others or without. A
page of the wide layers' group has other bytes in use than a page of the others.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_manager.layout import KVLayout, KVShape, LayerGroup, layer_groups
from model.architectures import llama
from model.architectures.registry import ARCHITECTURES
from model.attention.backend import AttentionBackend, StepShape
from model.blocks import PreNorm
from model.config import KV_BYTES, ModelConfig
from model.cpu.attention_backend import CpuAttention
from model.cpu.pages import Pages
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.page_moves import PageMoves
from model.reference.attention_backend import ReferenceAttention
from model.reference.row_pool import RowPool
from model.rope import Rope, read_rope
from model.tensors import Tensors
from scheduler.events import Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_moves import pages_of
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.checkpoints import write_ministral
from tests.support.engines import Rig, make_request, make_rig
from tests.support.kernels import the_machine
from tests.support.pages import exported, imported, sizes_of
from tests.support.planted import plant
from tests.support.swaps import always_swap

pytestmark = pytest.mark.sample(3)

KINDS, NEW = "ssfsfs", 16
SHAPES = [KVShape(1, 48, 48) if kind == "f" else KVShape(2, 16, 16) for kind in KINDS]
WINDOWS = {"windows": 20, "no windows": 256}  # tokens; no sequence is longer than 256
CHUNKS = SchedulerSettings(max_sequences=6, max_batched_tokens=40, prefill_chunk=16, steps_in_flight=2)
SMALL = SchedulerSettings(max_sequences=6, max_batched_tokens=24, prefill_chunk=5)
CPU = torch.device("cpu")


def kv_layout(config: ModelConfig, page_size: int, dtype: str) -> KVLayout:
    return KVLayout(layer_groups(SHAPES, config.windows), page_size=page_size, **sizes_of(dtype))


def load_mixed(config: ModelConfig, tensors: Tensors) -> Decoder:
    """`load_llama`, but for the shape of each layer's heads."""
    eps = llama.norm_eps(config)

    def layer(number: int) -> PreNorm:
        shape, at = SHAPES[number], tensors.under(f"model.layers.{number}.")
        own = replace(config, kv_heads=shape.heads, head_dim=shape.key_dim)
        frequencies, scale = read_rope(config.fields, shape.key_dim)
        rope = Rope(frequencies, config.context, tensors.dtype, tensors.device, scale)
        return PreNorm(
            at.rms_norm("input_layernorm", config.hidden, eps),
            llama.load_attention(own, at, number, rope),
            at.rms_norm("post_attention_layernorm", config.hidden, eps),
            llama.load_mlp(own, at),
        )

    return llama.load_decoder(config, tensors, [layer(number) for number in range(config.layers)])


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "MinistralForCausalLM", load_mixed)
    monkeypatch.setattr(ModelConfig, "kv_layout", kv_layout)
    always_swap(monkeypatch)


@pytest.fixture(scope="module", params=WINDOWS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = write_ministral(tmp_path_factory.mktemp("mixed"), WINDOWS[request.param], KINDS)
    tensors, random = load_file(place / "model.safetensors"), torch.Generator().manual_seed(7)
    for number in (i for i, kind in enumerate(KINDS) if kind == "f"):
        for name, size in (("q_proj", (4 * 48, 64)), ("k_proj", (48, 64)), ("v_proj", (48, 64)), ("o_proj", (64, 192))):
            key = f"model.layers.{number}.self_attn.{name}.weight"
            tensors[key] = torch.randn(size, generator=random) * 0.2
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some start alike, at lengths on both sides of windows and pages."""
    head, other = random_prompts([70, 100], seed=5)
    tails = random_prompts([1, 90, 7], seed=6)
    return [head + tail for tail in tails] + [other, other[:40] + tails[2], head[:33]]


def ran_alone(directory: Path, prompts: list[list[int]], backend: str, kv_dtype: str) -> Rig:
    """Each prompt by itself, without a cache of prefixes."""
    rig = make_rig(directory, record_logits=True, prefix_cache=False, backend=backend, kv_dtype=kv_dtype)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW)})
    return rig


def same(rig: Rig, alone: Rig, prompts: list[list[int]]) -> bool:
    """Whether each attempt has the tokens and the logits, bit by bit, of its prompt alone."""
    return all(
        result.tokens == alone.results[attempt % 100].tokens
        and rig.logits_of(attempt) == alone.logits_of(attempt % 100)
        for attempt, result in rig.results.items()
        if attempt % 100 < len(prompts)
    )


def pressed(
    directory: Path,
    prompts: list[list[int]],
    backend: str,
    kv_dtype: str,
    page_size: int,
    scheduling: SchedulerSettings,
) -> Rig:
    """All prompts three times, in a pool that holds the longest and little else, over a host tier."""
    rig = make_rig(
        directory, page_size, 180, scheduling, record_logits=True, queue=ENDLESS, host_pages=1200 // page_size,
        backend=backend, kv_dtype=kv_dtype,
    )  # fmt: skip
    for again in range(3):
        rig.run({100 * again + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    return rig


class Dense:
    """Attention over keys and values that stay tensors, for one sequence in one step: the plain statement."""

    def __init__(self, config: ModelConfig) -> None:
        self._config, self._kv = config, dict[int, tuple[Tensor, Tensor]]()

    def write(self, layer: int, keys: Tensor, values: Tensor, _plan: Any) -> None:
        self._kv[layer] = keys, values

    def attend(self, layer: int, queries: Tensor, _plan: Any, _sinks: None = None) -> Tensor:
        shared = queries.shape[1] // self._kv[layer][0].shape[1]
        keys, values = (part.repeat_interleave(shared, 1).transpose(0, 1) for part in self._kv[layer])
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * self._config.scale
        back = torch.arange(len(queries))[:, None] - torch.arange(len(queries))
        window = self._config.windows[layer] or len(queries)
        scores.masked_fill_((back < 0) | (back >= window), -torch.inf)
        return (scores.softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_dense_attention(directory: Path, prompts: list[list[int]], backend: str) -> None:
    rig = ran_alone(directory, prompts, backend, "auto")
    dense = make_rig(directory, backend="reference").loaded
    for i, prompt in enumerate(prompts):
        ids = [*prompt, *rig.results[i].tokens]
        every = torch.arange(len(ids))
        batch = ForwardBatch(torch.tensor(ids), every[None], every, Dense(dense.config), None)  # type: ignore[arg-type]
        with torch.inference_mode():
            expected = dense.runner.model.forward(batch).logits[len(prompt) - 1 : -1]
        found = torch.from_numpy(np.stack([rig.logits[i, position] for position in range(len(expected))]))
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "page_size", "scheduling"),
    [
        ("reference", "auto", 4, CHUNKS),
        pytest.param("reference", "int8", 16, SMALL, marks=pytest.mark.slow),
        ("cpu", "auto", 16, CHUNKS),
        pytest.param("cpu", "auto", 7, SMALL, marks=pytest.mark.slow),
        ("cpu", "int8", 16, SMALL),
        pytest.param("cpu", "fp8", 4, CHUNKS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(2)
def test_no_schedule_and_no_swap_changes_a_bit(
    directory: Path,
    prompts: list[list[int]],
    backend: str,
    kv_dtype: str,
    page_size: int,
    scheduling: SchedulerSettings,
) -> None:
    rig = pressed(directory, prompts, backend, kv_dtype, page_size, scheduling)
    assert same(rig, ran_alone(directory, prompts, backend, kv_dtype), prompts)
    assert any(rig.started.values())
    layout = rig.loaded.layout
    assert layout.windows or rig.scheduler.stats().swapped_in
    assert len({layout.group_bytes(group) for group in range(len(layout.groups))}) > 1


def layers_lie_in_one_place(patch: pytest.MonkeyPatch) -> None:
    plant(patch, Pages, "_start", lambda _: lambda self, group, index: 0)


def page_tables_count_in_other_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pages, "rows_of", lambda self, group, slots: slots)


def pages_have_the_form_of_the_smaller_group(patch: pytest.MonkeyPatch) -> None:
    def smaller(self: PageMoves, moves: NDArray[np.int32], pages: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.column_stack((moves, np.ones_like(pages)))

    plant(patch, PageMoves, "_with_groups", lambda _: smaller)


@pytest.mark.parametrize(
    "fault", [layers_lie_in_one_place, page_tables_count_in_other_rows, pages_have_the_form_of_the_smaller_group]
)
def test_a_fault_in_the_pool_is_noticed(
    directory: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    alone = ran_alone(directory, prompts, "cpu", "auto")
    if alone.loaded.layout.windows:
        pytest.skip("swaps are rare with windows")
    fault(monkeypatch)
    try:
        rig = pressed(directory, prompts, "cpu", "auto", 16, CHUNKS)
    except (AssertionError, RuntimeError):
        return
    assert not same(rig, alone, prompts)


def test_pages_move_to_an_engine_of_another_back_end(directory: Path, prompts: list[list[int]]) -> None:
    """In canonical form, which has the group's own size; beyond it are zeros."""
    one, other = (make_rig(directory, 4, 2048, backend=backend) for backend in ("cpu", "reference"))
    for rig in (one, other):
        rig.run({0: make_request(rig, prompts[0], 1)})
    moved, computed = (pages_of(rig, Submit(0, make_request(rig, prompts[0], 1))) for rig in (one, other))
    layout = one.loaded.layout
    assert len(moved) == len(computed) > 0
    for pages in zip(moved.values(), computed.values(), strict=True):  # in the same order; hashes are a back end's own
        for group in np.flatnonzero(pages[0].tables).tolist():
            used = layout.group_bytes(group)
            page, other_page = (one.of(group) for one in pages)
            own, theirs = (part[:used].view(np.float32) for part in (page, other_page))
            np.testing.assert_allclose(own, theirs, atol=1e-3)
            assert own.any()
            assert not page[used:].any()


SEVERAL_SHAPES = [*SHAPES[1:3], KVShape(2, 32, 32), KVShape(1, 16, 16), KVShape(1, 48, 32, latent=True)]
GROUPS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(SEVERAL_SHAPES)),
    min_size=2,
    max_size=3,
)


@given(
    groups=GROUPS,
    page_size=st.sampled_from([1, 3, 16, 32]),
    kv_dtype=st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    seed=st.integers(0, 99),
)
def test_both_back_ends_keep_the_same_pages(
    groups: list[tuple[int, KVShape]], page_size: int, kv_dtype: str, seed: int
) -> None:
    """Each page is of one group alone; what one exports the other imports; copies and poison touch their pages."""
    kept, counts = [], iter(range(9))
    for count, shape in groups:
        kept.append(LayerGroup(tuple(next(counts) for _ in range(count)), shape))
    layout = KVLayout(tuple(kept), page_size=page_size, **sizes_of(kv_dtype))
    dtype = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    eight_bit = kv_dtype if KV_BYTES[kv_dtype][1] else None
    pages = 2 * len(kept) + 1
    both: tuple[AttentionBackend, ...] = (
        CpuAttention(the_machine(), layout, pages, 2, dtype, eight_bit=eight_bit),
        ReferenceAttention(layout, pages, 2, kv_dtype, CPU),
    )
    random = np.random.default_rng(seed)
    owned = random.permutation(2 * len(kept)).reshape(len(kept), 2)
    tokens = random.permutation(2 * page_size)
    slots = np.stack([own[tokens // page_size] * page_size + tokens % page_size for own in owned])
    shape = StepShape(
        np.array([[0, 0, len(tokens)]], np.int32),
        np.arange(len(tokens)),
        slots,
        owned[:, None].astype(np.int32),
        np.zeros(1, np.int64),
    )
    for attention in both:
        attention.poison(np.arange(pages, dtype=np.int32))
    for group in kept:
        for layer in group.layers:
            size = (len(tokens), group.shape.heads, group.shape.key_dim)
            keys, values = (torch.from_numpy(random.normal(size=size)).float() for _ in range(2))
            values = keys[..., : group.shape.value_dim] if group.shape.latent else values
            for attention in both:
                attention.write(layer, keys, values, attention.plan(shape))
    kernels, reference = both
    for number, own in enumerate(owned):
        content = exported(kernels, own, number)
        assert torch.equal(content, exported(reference, own, number))
        kernels.copy(np.array([[own[0], pages - 1]], np.int32))
        assert torch.equal(exported(kernels, [pages - 1], number), content[:1])
        imported(reference, [pages - 1], content[1:], number)
        assert torch.equal(exported(reference, [pages - 1, *own], number), content[[1, 0, 1]])
    kernels.poison(owned[0].astype(np.int32))
    assert torch.equal(exported(kernels, owned[-1], len(kept) - 1), exported(reference, owned[-1], len(kept) - 1))


UNLIKE = (
    LayerGroup((0, 1), KVShape(2, 8, 3)),
    LayerGroup((2,), KVShape(1, 24, 5)),
    LayerGroup((3, 4), KVShape(1, 24, 16, latent=True)),
)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_keys_and_values_may_differ_in_size(kv_dtype: str) -> None:
    """Or the value may be part of the key: then it is not kept."""
    layout = KVLayout(UNLIKE, page_size=4, **sizes_of(kv_dtype))
    one, other = (ReferenceAttention(layout, 5, 2, kv_dtype, CPU) for _ in range(2))
    pool = RowPool(layout, 5, kv_dtype, CPU)
    slots = np.array([12, 3, 17, 0])
    near = {"float32": 0.0, "int8": 1 / 127, "fp8": 1 / 16}[kv_dtype]  # of a row's largest element
    for number, group in enumerate(layout.groups):
        for layer in group.layers:
            keys = torch.randn((4, group.shape.heads, group.shape.key_dim))
            values = torch.randn((4, group.shape.heads, group.shape.value_dim))
            values = keys[..., : group.shape.value_dim] if group.shape.latent else values
            places = pool.places(number, slots)
            pool.write(layer, places, keys, values)
            for found, written in zip(pool.read(layer, places), (keys, values), strict=True):
                assert torch.allclose(found, written.transpose(0, 1), rtol=0, atol=near * 4)
                assert near or torch.equal(found, written.transpose(0, 1))
            step = StepShape(
                np.array([[0, 0, 4]], np.int32), np.arange(4), np.tile(slots, (3, 1)),
                np.zeros((3, 1, 5), np.int32), np.zeros(1, np.int64),
            )  # fmt: skip
            one.write(layer, keys, values, one.plan(step))
        content = exported(one, [3, 0, 4], number)
        imported(other, [1, 2, 3], content, number)
        assert content.any()
        assert torch.equal(exported(other, [1, 2, 3], number), content)


def test_a_latent_is_kept_once() -> None:
    layout = KVLayout((LayerGroup((0,), KVShape(1, 576, 512, latent=True)),), page_size=4, **sizes_of("bfloat16"))
    assert layout.layer_bytes(0) == 2 * 576
    eight_bit = KVLayout(layout.groups, page_size=4, **sizes_of("int8"))
    assert eight_bit.layer_bytes(0) == 576 + KV_BYTES["int8"][1]
