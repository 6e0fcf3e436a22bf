"""Draws from what top_k and top_p leave, beside a sort in numpy, and beside torch's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from model.gpu import cutoff
from model.gpu.cutoff import MOST_VOCABULARY, draw_from_top, scratch_bytes
from model.gpu.draws import start_draws
from model.sampling.random import gumbel, row_keys
from model.sampling.sampler import TORCH_OPS, Draws, SamplingRows
from scheduler.controls import Controls
from scheduler.step import Join
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED


def draws_of(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> Draws:
    keys = row_keys(np.arange(seed, seed + n, dtype=np.uint64), np.zeros(n, np.int64), np.arange(n))
    filled = (np.full(n, one) for one in (temperature, min_p))
    return Draws(np.arange(n), keys, *filled, np.full(n, top_k), np.full(n, top_p))


def sorted_draw(logits: NDArray[np.float32], draws: Draws, draw: int) -> int:
    """The definition: tokens in order of their logits, the lower id first among equals, cut off by exact sums."""
    x = logits[draws.rows[draw]].astype(np.float64)
    scaled = (x - x.max()) / draws.temperature[draw]
    with np.errstate(divide="ignore"):
        ids = np.flatnonzero(scaled >= np.log(draws.min_p[draw]))
    weights = np.floor(np.exp(scaled) * 2.0**44).astype(np.int64)
    ids = ids[np.lexsort((ids, -x[ids]))]
    if top_k := int(draws.top_k[draw]):
        ids = ids[x[ids] >= x[ids][min(top_k, len(ids)) - 1]]
    sums = np.cumsum(weights[ids])
    ids = ids[(sums - weights[ids]).astype(np.float64) < draws.top_p[draw] * float(sums[-1])] if len(ids) else ids
    noise = gumbel(torch.from_numpy(draws.keys[draw : draw + 1]), torch.from_numpy(ids))[0].numpy()
    return int(ids[np.argmax(scaled[ids] + noise)])


def check(logits: Tensor, draws: Draws) -> None:
    found = draw_from_top(logits.to(DEVICE), draws).cpu().numpy()
    expected = [sorted_draw(logits.numpy(), draws, i) for i in range(len(draws.rows))]
    assert found.tolist() == expected
    assert found.tolist() == TORCH_OPS.draw_from_top(logits, draws).tolist()


def logits_of(rows: int, vocabulary: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))


CONTROLS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "both": {"top_k": 20, "top_p": 0.9},
    "one token": {"top_k": 1},
    "nearly none": {"top_p": 1e-9},
    "nearly all": {"top_p": 1 - 1e-9},
    "more than there are": {"top_k": 10**6, "top_p": 0.5},
    "min_p too": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "cold": {"temperature": 0.05, "top_p": 0.99},
    "hot": {"temperature": 8.0, "top_k": 300, "top_p": 0.7},
    "nearly at once": {"temperature": 1e-40, "top_p": 0.5},
}


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("vocabulary", [1, 70, 4500])
def test_draws_are_those_of_a_sort(controls: dict[str, Any], vocabulary: int) -> None:
    check(logits_of(4, vocabulary), draws_of(4, **controls))


@pytest.mark.parametrize("controls", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 40, "top_p": 0.8}])
def test_ties(controls: dict[str, Any]) -> None:
    """top_k keeps all that are as high as the k-th, top_p those with the lowest ids. 0 and -0 are equal."""
    logits = (logits_of(6, 600) * 0.3).round()
    logits[1] = 0.0
    logits[2] = torch.tensor([0.0, -0.0]).repeat(300)
    logits[3, :] = -torch.inf
    logits[3, 7::50] = 2.0
    for seed in range(0, 18, 6):
        check(logits, draws_of(6, seed=seed, **controls))


@pytest.mark.parametrize("controls", [{"top_p": 0.97}, {"top_k": 400}, {"top_k": 500, "top_p": 0.99}])
def test_more_tokens_than_a_list_has(controls: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutoff, "LISTED", 128)
    check(logits_of(3, 900, spread=0.3), draws_of(3, **controls))


def test_the_sum_of_what_top_k_leaves_is_whole() -> None:
    """The sum has what top_p cuts off of it as well: seen on an H200, where more examples are drawn."""
    check(logits_of(2, 22, 1.0, 4), draws_of(2, 0.75, 18, 0.75, seed=4))
    for top_k in (9, 18, 21, 22, 23):
        check(logits_of(12, 22, 1.0, top_k), draws_of(12, 0.75, top_k, 0.75, seed=top_k))


@settings(max_examples=20 if INTERPRETED else 300, deadline=None)
@given(
    st.integers(1, 400), st.sampled_from([0.1, 1.0, 6.0]), st.floats(0.05, 5.0), st.integers(0, 60),
    st.floats(0.01, 1.0), st.sampled_from([0.0, 0.02, 1.0]), st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
def test_any_draw(
    vocabulary: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, coarse: bool
) -> None:
    logits = logits_of(2, vocabulary, spread, seed)
    logits = logits.bfloat16().float() if coarse else logits
    check(logits, draws_of(2, temperature, top_k, top_p, min_p, seed))


def test_rows_that_are_not_finite_harm_no_other() -> None:
    logits = logits_of(6, 500)
    draws = draws_of(6, top_k=20, top_p=0.9)
    expected = draw_from_top(logits.to(DEVICE), draws).cpu()
    logits[1], logits[2, 100], logits[4] = torch.nan, torch.nan, -torch.inf
    logits[3, 5] = torch.inf
    found = draw_from_top(logits.to(DEVICE), draws).cpu()
    assert found[[0, 5]].tolist() == expected[[0, 5]].tolist()
    assert ((found >= 0) & (found < 500)).all()


def test_a_draw_does_not_depend_on_the_others() -> None:
    logits = logits_of(5, 5000).to(DEVICE)
    draws = draws_of(5, top_k=30, top_p=0.9)
    together = draw_from_top(logits, draws)
    assert [draw_from_top(logits, draws.of(np.array([i]))).item() for i in range(5)] == together.tolist()


def test_a_vocabulary_whose_sums_would_not_be_exact_is_sorted() -> None:
    logits, draws = logits_of(1, MOST_VOCABULARY + 1), draws_of(1, top_k=3)
    assert draw_from_top(logits.to(DEVICE), draws).tolist() == TORCH_OPS.draw_from_top(logits, draws).tolist()


class Launches:
    def __init__(self, kernel: Any, count: list[str], name: str) -> None:
        self.kernel, self.count, self.name = kernel, count, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count.append(self.name)
        return self.kernel[grid]


def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are in the same launches: two that summarise, four that draw, one that packs."""
    count: list[str] = []
    for module, names in (
        ("model.gpu.cutoff", ("weigh_blocks", "bound_draws", "list_tokens", "draw_listed")),
        ("model.gpu.sampler", ("summarise_blocks", "join_summaries", "draw_blocks", "join_draws")),
        ("model.gpu.draws", ("pack_results",)),
    ):
        for name in names:
            made = Launches(getattr(__import__(module, fromlist=[name]), name), count, name)
            monkeypatch.setattr(f"{module}.{name}", made)
    controls = SamplingRows(9)
    for row in range(9):
        controls.join(Join(row, np.arange(9, dtype=np.int32), 9, Controls(1.0, 0.9, 20, 0.0, row)))
    logits, rows = logits_of(9, 600).to(DEVICE), np.arange(9)
    with torch.profiler.profile() as profile:
        drawn = start_draws(logits, controls, rows, rows).fetch()
    assert len(count) == 7
    draws = replace(draws_of(9, 1.0, 20, 0.9), keys=row_keys(rows.astype(np.uint64), 0 * rows, rows))
    assert drawn.tokens.tolist() == TORCH_OPS.draw_from_top(logits.cpu(), draws).tolist()
    # Torch's own operations: the transfer of controls, and that of results.
    moved = {"aten::copy_", "aten::_to_copy", "aten::to", "aten::cat"}
    others = {event.key for event in profile.key_averages()} - moved
    assert not [name for name in others if "sort" in name or "cumsum" in name or "scatter" in name]


def test_the_comparison_sees_a_bound_that_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cutoff.bound_draws

    class Lower:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                made[grid](*arguments, **constants)
                arguments[3].fill_(3)

            return launch

    monkeypatch.setattr(cutoff, "bound_draws", Lower())
    with pytest.raises(AssertionError):
        check(logits_of(15, 300), draws_of(15, top_p=0.95))


def test_scratch_is_small_beside_the_logits() -> None:
    assert scratch_bytes(256, 151_936) < 256 * 151_936 * 4 / 10
