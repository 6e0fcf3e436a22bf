"""The sampler against a plain statement of its filters, token by token and as a distribution."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.cpu.kernels.logits import KernelOps
from model.sampling.sampler import TORCH_OPS, Drawn, LogitOps, SamplingRows, sample
from scheduler.controls import Controls
from scheduler.step import Join
from tests.model.test_random import key_of, noise_of
from tests.support.examples import examples
from tests.support.kernels import the_machine

Floats = NDArray[np.float64]
OPS: list[LogitOps] = [TORCH_OPS]  # those of the test that runs


@pytest.fixture(scope="module", autouse=True, params=["torch", "kernels"])
def _ops(request: pytest.FixtureRequest) -> None:
    """Everything here holds for both."""
    OPS[0] = TORCH_OPS if request.param == "torch" else KernelOps(the_machine())


GREEDY = Controls(0.0, 1.0, 0, 0.0, 0)


@dataclass(frozen=True)
class Draw:
    """One row to draw for."""

    logits: tuple[float, ...]
    controls: Controls
    index: int = 0
    position: int = 0


def draw(draws: list[Draw], rows: list[int] | None = None) -> Drawn:
    """All in one batch, on these batch rows."""
    rows = list(range(len(draws))) if rows is None else rows
    controls = SamplingRows(max(rows) + 1)
    for row, one in zip(rows, draws, strict=True):
        controls.join(Join(row, np.zeros(1, np.int32), 1, one.controls, one.index))
    logits = torch.tensor([one.logits for one in draws], dtype=torch.float32)
    positions = np.array([one.position for one in draws], np.int64)
    return sample(logits, controls, np.array(rows, np.int64), positions, OPS[0])


def allowed(logits: Floats, controls: Controls) -> list[int]:
    """Token ids that the filters leave: temperature, min_p, top_k (ties kept), top_p (the crossing token kept)."""
    scaled = logits / controls.temperature
    kept = [i for i in range(len(scaled)) if math.exp(scaled[i] - max(scaled)) >= controls.min_p]
    if controls.top_k:
        lowest = sorted((scaled[i] for i in kept), reverse=True)[: controls.top_k][-1]
        kept = [i for i in kept if scaled[i] >= lowest]
    weights = {i: math.exp(scaled[i] - max(scaled)) for i in kept}
    total, before, result = sum(weights.values()), 0.0, []
    for i in sorted(kept, key=lambda i: (-scaled[i], i)):
        if not result or before / total < controls.top_p:
            result.append(i)
        before += weights[i]
    return result


def plain_draw(one: Draw) -> int:
    """The same, with noise from Python's own integers."""
    logits = np.array(one.logits, np.float32).astype(np.float64)
    if one.controls.temperature == 0:
        return int(np.argmax(logits))
    key = key_of(one.controls.seed, one.index, one.position)
    return max(allowed(logits, one.controls), key=lambda i: logits[i] / one.controls.temperature + noise_of(key, i))


@st.composite
def draws_of(draw: st.DrawFn, vocabulary: int) -> Draw:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=vocabulary) * draw(st.sampled_from([0.5, 2.0, 6.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    controls = Controls(
        # Off the round numbers, on which the last bit of a sum decides what is beyond top_p or min_p.
        temperature=draw(st.sampled_from([0.0, 0.3007, 0.7003, 1.0, 1.9001])),
        top_p=draw(st.sampled_from([1.0, 0.1001, 0.4999, 0.9003])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, vocabulary, 10**6, 2**32 - 1])),
        min_p=draw(st.sampled_from([0.0, 0.0503, 0.5009, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        top_logprobs=draw(st.sampled_from([-1, -1, 0, 3])),
    )
    return Draw(tuple(logits.tolist()), controls, draw(st.integers(0, 9)), draw(st.integers(0, 10**6)))


batches = st.integers(2, 40).flatmap(lambda vocabulary: st.lists(draws_of(vocabulary), min_size=1, max_size=8))


@settings(max_examples=examples(300), deadline=None)
@given(batch=batches)
def test_every_draw_is_the_plain_one(batch: list[Draw]) -> None:
    assert draw(batch).tokens.tolist() == [plain_draw(one) for one in batch]


@settings(max_examples=examples(100), deadline=None)
@given(batch=batches, data=st.data())
def test_a_draw_does_not_depend_on_batch_order_or_row(batch: list[Draw], data: st.DataObject) -> None:
    alone = [draw([one]) for one in batch]
    order = data.draw(st.permutations(range(len(batch))))
    rows = data.draw(st.lists(st.integers(0, 50), min_size=len(batch), max_size=len(batch), unique=True))
    together = draw([batch[i] for i in order], rows)
    for place, i in enumerate(order):
        assert together.tokens[place] == alone[i].tokens[0]
        assert together.logprobs.chosen[place].tobytes() == alone[i].logprobs.chosen[0].tobytes()


def with_probabilities(probabilities: list[float], **controls: float) -> Draw:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3} | controls
    return Draw(tuple(math.log(p) for p in probabilities), Controls(**values))  # type: ignore[arg-type]


def tokens_of_many(one: Draw, count: int) -> NDArray[np.int32]:
    """Draws at the positions 0 .. count - 1."""
    controls = SamplingRows(1)
    controls.join(Join(0, np.zeros(1, np.int32), 1, one.controls, one.index))
    logits = torch.tensor([one.logits], dtype=torch.float32).expand(count, -1)
    return sample(logits, controls, np.zeros(count, np.int64), np.arange(count), OPS[0]).tokens


FIVE = [0.30, 0.20, 0.18, 0.17, 0.15]
KEPT = {
    "nothing filtered": (FIVE, {}, {0, 1, 2, 3, 4}),
    "top_p works on what top_k left": (FIVE, {"top_k": 2, "top_p": 0.5}, {0}),
    "top_p keeps the token that crosses it": ([0.5, 0.45, 0.05], {"top_p": 0.9}, {0, 1}),
    "top_p keeps the first even if it crosses": ([0.95, 0.05], {"top_p": 0.1}, {0}),
    "top_p that is met exactly": ([0.5, 0.5], {"top_p": 0.5}, {0}),
    "top_k": (FIVE, {"top_k": 3}, {0, 1, 2}),
    "top_k 1": (FIVE, {"top_k": 1}, {0}),
    "top_k keeps ties with the last": ([0.1, 0.3, 0.2, 0.2, 0.2], {"top_k": 2}, {1, 2, 3, 4}),
    "top_k above the vocabulary": (FIVE, {"top_k": 1000}, {0, 1, 2, 3, 4}),
    "min_p": (FIVE, {"min_p": 0.59}, {0, 1, 2}),
    "min_p 1 keeps ties with the first": ([0.4, 0.4, 0.2], {"min_p": 1.0}, {0, 1}),
    "min_p goes before top_k": ([0.5, 0.3, 0.1, 0.1], {"min_p": 0.5, "top_k": 3}, {0, 1}),
    "min_p goes before top_p": ([0.45, 0.35, 0.2], {"min_p": 0.6, "top_p": 0.56}, {0}),
    "temperature goes before min_p": (FIVE, {"temperature": 0.1, "min_p": 0.1}, {0}),
    "temperature goes before top_p": (FIVE, {"temperature": 0.1, "top_p": 0.9}, {0}),
}


@pytest.mark.parametrize("name", KEPT)
def test_filters_keep(name: str) -> None:
    probabilities, controls, kept = KEPT[name]
    assert set(tokens_of_many(with_probabilities(probabilities, **controls), 400).tolist()) == kept


@pytest.mark.parametrize(
    "controls",
    [{}, {"temperature": 0.5}, {"temperature": 1.8}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.55, "top_p": 0.9}],
    ids=str,
)
def test_draws_have_the_right_distribution(controls: dict[str, float]) -> None:
    """Chi-square over 20,000 draws; the seed is fixed, so this passes always or never."""
    one, count = with_probabilities([*FIVE, 1e-12], **controls), 20_000
    kept = allowed(np.array(one.logits), one.controls)
    weights = np.exp(np.array(one.logits) / one.controls.temperature)[kept]
    expected = weights / weights.sum() * count
    observed = np.bincount(tokens_of_many(one, count), minlength=6)
    assert observed[kept].sum() == count
    common = expected > 5
    statistic = ((observed[kept][common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = np.count_nonzero(common) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    assert observed[5] == 0


def test_a_filter_that_forbids_nothing_changes_no_draw() -> None:
    """The sorted path and the plain one add the same noise to the same token."""
    rng = np.random.default_rng(0)
    one = Draw(tuple(rng.normal(size=50).tolist()), Controls(1.0, 1.0, 0, 0.0, 9))
    plain = tokens_of_many(one, 300)
    for controls in (Controls(1.0, 1.0, 50, 0.0, 9), Controls(1.0, 1 - 1e-9, 0, 0.0, 9)):
        assert tokens_of_many(Draw(one.logits, controls), 300).tolist() == plain.tolist()


def test_tokens_that_cannot_be_drawn_change_no_draw() -> None:
    one = with_probabilities(FIVE)
    wider = Draw((*one.logits, -math.inf, -math.inf), one.controls)
    assert tokens_of_many(wider, 300).tolist() == tokens_of_many(one, 300).tolist()


def test_seed_and_sequence_index_matter() -> None:
    base = with_probabilities(FIVE)
    others = [
        Draw(base.logits, Controls(1.0, 1.0, 0, 0.0, 4)),
        Draw(base.logits, Controls(1.0, 1.0, 0, 0.0, 3 + 2**32)),
        Draw(base.logits, base.controls, index=1),
    ]
    for other in others:
        assert tokens_of_many(other, 50).tolist() != tokens_of_many(base, 50).tolist()


@pytest.mark.parametrize("vocabulary", [5, 200_003])
def test_greedy_is_the_first_of_the_largest(vocabulary: int) -> None:
    logits = np.zeros(vocabulary)
    logits[[2, 4, vocabulary - 1]] = 7.0
    assert draw([Draw(tuple(logits.tolist()), GREEDY)]).tokens.tolist() == [2]
    assert draw([Draw((-math.inf, -3.0, -math.inf, -3.0), GREEDY)]).tokens.tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 1e-308, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperatures_are_greedy(temperature: float, top_p: float) -> None:
    """Every temperature in [0, 2] is allowed: logits over it may not overflow."""
    for logits in ((5.0, 6.0, 20.0, 3.0), (-5.0, -6.0, -2.0, -3.0)):
        drawn = draw([Draw(logits, Controls(temperature, top_p, 0, 0.0, 1))])
        assert drawn.tokens.tolist() == [2]


def test_a_join_sets_all_of_a_row() -> None:
    controls = SamplingRows(2)
    for index, one in ((4, Controls(1.5, 0.5, 7, 0.25, 2**64 - 1, 5)), (0, GREEDY)):
        controls.join(Join(1, np.zeros(1, np.int32), 1, one, index))
        found = Controls(
            *(a[1].item() for a in (controls.temperature, controls.top_p, controls.top_k, controls.min_p)),
            controls.seed[1].item(),
            controls.top_logprobs[1].item(),
        )
        assert (found, controls.index[1]) == (one, index)


def asking(top_logprobs: int, temperature: float = 0.0) -> Controls:
    return Controls(temperature, 1.0, 0, 0.0, 5, top_logprobs)


def test_logprobs_against_numpy() -> None:
    """Logprobs are those of the raw logits, whatever the temperature and the filters."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 97)) * 3
    controls = [asking(5), Controls(0.5, 0.9, 10, 0.1, 5, 3), asking(0, 1.7), asking(-1)]
    drawn = draw([Draw(tuple(row), c) for row, c in zip(logits.tolist(), controls, strict=True)])
    wide = logits.astype(np.float32).astype(np.float64)
    normal = np.log(np.exp(wide).sum(1, keepdims=True))
    found = drawn.logprobs
    chosen = (wide - normal)[np.arange(4), drawn.tokens]
    np.testing.assert_allclose(found.chosen, chosen, atol=1e-5)
    assert (
        found.rank[:3].tolist()
        == [1 + int((row > row[t]).sum()) for row, t in zip(wide, drawn.tokens, strict=True)][:3]
    )
    assert found.top_ids.shape == found.top.shape == (4, 5)
    for i, one in enumerate(controls[:3]):
        best = np.argsort(-wide[i], kind="stable")[: one.top_logprobs]
        assert found.top_ids[i, : one.top_logprobs].tolist() == best.tolist()
        np.testing.assert_allclose(found.top[i, : one.top_logprobs], (wide[i] - normal[i])[best], atol=1e-5)
    assert (found.chosen.dtype, found.top.dtype) == (np.float32, np.float32)


def test_logprobs_of_nobody_cost_nothing_but_the_score() -> None:
    drawn = draw([Draw((1.0, 2.0), asking(-1)), Draw((1.0, 0.0), asking(-1))])
    assert drawn.logprobs.top_ids.shape == drawn.logprobs.top.shape == (2, 0)
    np.testing.assert_allclose(drawn.logprobs.chosen, [-math.log1p(math.exp(-1.0))] * 2, rtol=1e-6)


def test_more_alternatives_than_tokens() -> None:
    drawn = draw([Draw((1.0, 3.0, 2.0), asking(20))])
    assert drawn.logprobs.top_ids.tolist() == [[1, 2, 0]]


def test_rank_of_a_tie_counts_only_what_is_larger() -> None:
    drawn = [draw([Draw((2.0, 2.0, 2.0, 2.5), Controls(2.0, 1.0, 0, 0.0, seed, 0))]) for seed in range(20)]
    found = {(int(d.tokens[0]), int(d.logprobs.rank[0])) for d in drawn}
    assert found == {(0, 2), (1, 2), (2, 2), (3, 1)}


def test_alternatives_do_not_depend_on_what_others_ask() -> None:
    """bfloat16 logits tie often: the order of ties must not follow from the most that anyone in the batch asked for."""
    rng = np.random.default_rng(2)
    logits = tuple(torch.from_numpy(rng.normal(size=2048) * 3).bfloat16().float().tolist())
    for k in range(1, 20):
        alone = draw([Draw(logits, asking(k))]).logprobs
        beside = draw([Draw(logits, asking(k)), Draw(logits, asking(20))]).logprobs
        assert beside.top_ids[0, :k].tolist() == alone.top_ids[0].tolist()


def test_the_first_alternative_of_a_greedy_token_is_itself() -> None:
    rng = np.random.default_rng(3)
    for seed in range(20):
        logits = np.round(rng.normal(size=300) * 2)
        drawn = draw([Draw(tuple(logits.tolist()), asking(1 + seed % 5))])
        assert drawn.logprobs.top_ids[0, 0] == drawn.tokens[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("controls", [GREEDY, Controls(1.0, 1.0, 0, 0.0, 1), Controls(0.7, 0.9, 5, 0.1, 1)], ids=str)
def test_logits_that_are_not_finite_show_in_the_score_of_their_row_alone(bad: float, controls: Controls) -> None:
    sick, healthy = Draw((1.0, bad, 0.5, 0.0), controls, position=1), Draw((1.0, 3.0, 0.5, 0.0), controls, position=2)
    drawn = draw([healthy, sick, healthy])
    assert np.isfinite(drawn.logprobs.chosen).tolist() == [True, False, True]
    assert drawn.tokens[[0, 2]].tolist() == [plain_draw(healthy)] * 2
    assert ((drawn.tokens >= 0) & (drawn.tokens < 4)).all()
    everything = draw([Draw((bad,) * 4, controls)])
    assert not np.isfinite(everything.logprobs.chosen).any()
