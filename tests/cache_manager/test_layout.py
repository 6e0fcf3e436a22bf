"""Bytes of keys and values, and how tokens divide into pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.layout import KVLayout

SMALL = st.integers(1, 64)


def layout(groups: int, layers: int, kv_heads: int, head_dim: int, element_bytes: int, page_size: int) -> KVLayout:
    numbers = tuple(tuple(range(g * layers, (g + 1) * layers)) for g in range(groups))
    return KVLayout(numbers, kv_heads, head_dim, element_bytes, page_size)


layouts = st.builds(layout, st.integers(1, 4), SMALL, SMALL, SMALL, st.sampled_from((1, 2, 4)), SMALL)


@pytest.mark.parametrize(("kv_heads", "gigabytes"), [(32, 17.18), (8, 4.29)])
def test_known_sizes_of_a_cache_of_32768_tokens(kv_heads, gigabytes):
    cache = layout(1, 32, kv_heads, 128, 2, 16)
    assert round(cache.token_bytes * 32_768 / 1e9, 2) == gigabytes
    assert cache.pages_for(32_768) * cache.page_bytes == cache.token_bytes * 32_768


@given(layouts)
def test_a_token_takes_keys_and_values_of_all_layers_and_kv_heads(cache):
    layers = sum(len(group) for group in cache.groups)
    assert cache.token_bytes == 2 * layers * cache.kv_heads * cache.head_dim * cache.element_bytes
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


@pytest.mark.parametrize("groups", [(), ((0, 1), (2,))])
def test_groups_must_have_equally_many_layers(groups):
    with pytest.raises(ValueError, match="equally many layers"):
        KVLayout(groups, 2, 8, 2, 16)
