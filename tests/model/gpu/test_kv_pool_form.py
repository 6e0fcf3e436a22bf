"""The GPU's pool moves pages in wide elements: each page's bytes are in their places, in every dtype and size."""

import numpy as np
import pytest
import torch

from cache_manager.layout import KVLayout
from model.gpu.kv_pool import KVPool

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kv", "element", "scale", "heads", "dim", "page_size"),
    [
        ("bfloat16", 2, 0, 8, 128, 16), ("float32", 4, 0, 2, 6, 5), ("int8", 1, 4, 3, 5, 3), ("fp8", 1, 4, 2, 64, 16),
        ("bfloat16", 2, 0, 1, 1, 1),
    ],
)  # fmt: skip
def test_the_gpus_pool_has_heads_before_tokens_and_canonical_form_tokens_before_heads(
    kv: str, element: int, scale: int, heads: int, dim: int, page_size: int
) -> None:
    layout = KVLayout.uniform(((0, 1), (2, 3)), heads, dim, element, page_size, scale)
    pool = KVPool(layout, 9, kv, CPU)
    pages, groups = np.array([3, 1, 7, 2], np.int32), np.array([0, 1, 0, 1], np.int32)
    content = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    pool.import_pages(pages, groups, content)
    assert torch.equal(pool.export(pages, groups), content)
    assert torch.equal(pool.export(pages[::2], groups[::2]), content[::2])
    pool.copy(np.array([[3, 0], [7, 8]], np.int32))
    assert torch.equal(pool.export(np.array([0, 8], np.int32), groups[::2]), content[::2])
    size = heads * page_size * dim * element
    for layer in range(2):
        for kind, kept in enumerate(pool.elements(0, layer)):
            raw = kept.view(torch.uint8)[3 * pool.stride :][:size].view(heads, page_size, -1)
            at = (2 * layer + kind) * size
            assert torch.equal(raw.transpose(0, 1), content[0, at : at + size].view(page_size, heads, -1))
