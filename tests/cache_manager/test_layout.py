"""Bytes of keys and values, and how tokens divide into pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.layout import KVLayout, KVShape, LayerGroup, layer_groups

SMALL = st.integers(1, 64)


KV = KVShape(2, 8, 8)


def layout(groups: int, layers: int, kv_heads: int, head_dim: int, element_bytes: int, page_size: int) -> KVLayout:
    numbers = tuple(tuple(range(g * layers, (g + 1) * layers)) for g in range(groups))
    return KVLayout.uniform(numbers, kv_heads, head_dim, element_bytes, page_size)


layouts = st.builds(layout, st.integers(1, 4), SMALL, SMALL, SMALL, st.sampled_from((1, 2, 4)), SMALL)


@pytest.mark.parametrize(("kv_heads", "gigabytes"), [(32, 17.18), (8, 4.29)])
def test_known_sizes_of_a_cache_of_32768_tokens(kv_heads, gigabytes):
    cache = layout(1, 32, kv_heads, 128, 2, 16)
    assert round(cache.token_bytes * 32_768 / 1e9, 2) == gigabytes
    assert cache.pages_for(32_768) * cache.page_bytes == cache.token_bytes * 32_768


@given(layouts)
def test_a_token_takes_keys_and_values_of_all_layers_and_kv_heads(cache):
    kv, layers = cache.groups[0].shape, sum(len(group.layers) for group in cache.groups)
    assert cache.token_bytes == 2 * layers * kv.heads * kv.key_dim * cache.element_bytes
    assert cache.page_bytes * len(cache.groups) == cache.token_bytes * cache.page_size


@given(layouts, st.integers(0, 10_000))
def test_pages_for_is_the_least_number_that_holds_the_tokens(cache, tokens):
    pages = cache.pages_for(tokens)
    assert pages % len(cache.groups) == 0
    assert cache.tokens_in(pages) >= tokens
    assert pages == 0 or cache.tokens_in(pages - 1) < tokens


@given(layouts, st.integers(0, 1000))
def test_a_sequence_of_tokens_in_the_pool_fits_it(cache, pages):
    assert cache.pages_for(cache.tokens_in(pages)) <= pages
    assert cache.pages_for(cache.tokens_in(pages) + 1) > pages


@pytest.mark.parametrize("page_size", [0, -1])
def test_page_size_below_one_is_refused(page_size):
    with pytest.raises(ValueError, match=rf"page size is {page_size}, must be at least 1"):
        layout(1, 2, 2, 8, 2, page_size)


@pytest.mark.parametrize("groups", [(), (LayerGroup((0, 1), KV), LayerGroup((), KV))])
def test_groups_without_layers_are_refused(groups):
    with pytest.raises(ValueError, match="each layer group must have layers"):
        KVLayout(groups, 2, 16)


SHAPES = st.sampled_from([KVShape(2, 8, 8), KVShape(1, 8, 8), KVShape(1, 24, 24), KVShape(1, 5, 0)])
models = st.lists(st.tuples(SHAPES, st.sampled_from((None, 20))), min_size=1, max_size=12)


def cut(kinds):
    return layer_groups([shape for shape, _ in kinds], [window for _, window in kinds])


@given(models)
def test_each_layer_is_in_one_group_with_layers_of_its_kind(kinds):
    groups = cut(kinds)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(kinds)))
    assert all((group.shape, group.window) == kinds[layer] for group in groups for layer in group.layers)
    assert [group.window for group in groups] == sorted((g.window for g in groups), key=lambda w: w is not None)


@given(models)
def test_no_other_page_costs_less(kinds):
    """Brute force: for each number of elements that a page could have room for, each kind in as few groups as fit."""
    groups, counts = cut(kinds), {kind: kinds.count(kind) for kind in kinds}
    room = max(len(group.layers) * group.shape.elements for group in groups)

    def cost(size: int) -> tuple[int, int]:
        count = sum(-(-layers // (size // shape.elements)) for (shape, _), layers in counts.items())
        return size * count, count

    most = sum(shape.elements for shape, _ in kinds)
    assert (room * len(groups), len(groups)) == min(cost(n) for n in range(max(s.elements for s, _ in kinds), most + 1))


@given(models, st.sampled_from((1, 7, 16, 48)), st.sampled_from(((4, 0), (2, 0), (1, 4))))
def test_a_page_has_room_for_each_group_in_whole_rows(kinds, page_size, sizes):
    """A page is a whole number of the tokens that kernels read together, in each group's own size."""
    element, scale = sizes
    made = KVLayout(cut(kinds), element, page_size, scale)
    needed = [made.group_bytes(group) for group in range(len(made.groups))]
    assert max(needed) <= made.page_bytes
    if made.same_shapes:
        assert set(needed) == {made.page_bytes}
    else:
        together = 16 if page_size % 16 == 0 else 1
        assert not any(made.page_bytes % (together * made.layer_bytes(group)) for group in range(len(made.groups)))
