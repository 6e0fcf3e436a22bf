"""For which steps there are graphs, and of which models."""

import pytest

from model.blocks import Experts, GatedMLP
from model.gpu.graphs import sizes_of_graphs, why_not
from model.layers import silu


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 100, 256, 1000])
def test_a_step_is_filled_up_by_a_third_at_most(most: int) -> None:
    sizes = sizes_of_graphs(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        up = next(size for size in sizes if size >= rows)
        assert rows <= 4 or 3 * (up - rows) < up


def test_a_model_with_experts_is_not_recorded() -> None:
    mlp = GatedMLP(abs, abs, silu)
    assert why_not([mlp, (mlp,)]) is None
    assert "experts" in (why_not([mlp, (Experts(abs, [mlp], 1, True),)]) or "")
