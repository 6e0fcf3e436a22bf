"""Controls of a simulated engine change logits as the built-in processors of a real one do."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.processor_rows import ProcessorRows
from model.sampling.sampler import SamplingRows, sample
from model.simulated.changed_logits import ChangedRow, changes_logits, whole_logits
from model.simulated.distribution import CANDIDATES, LOGITS, VOCABULARY, candidates, cumulative
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.step import NO_TOKEN, Join
from tests.support.examples import examples

IDS = st.integers(0, VOCABULARY - 1)
SOME = st.lists(IDS, max_size=6, unique=True).map(tuple)
PARAMS = st.builds(
    LogitsParams,
    allowed=SOME,
    banned=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    not_yet=SOME,
    min_tokens=st.integers(0, 5),
    bias=st.lists(
        st.tuples(IDS, st.sampled_from((-100.0, -1.5, 3.0, 100.0))), max_size=4, unique_by=lambda b: b[0]
    ).map(tuple),
    repetition=st.sampled_from((1.0, 0.5, 1.7)),
    frequency=st.sampled_from((0.0, 0.5, -1.0)),
    presence=st.sampled_from((0.0, 1.0)),
)
OUTPUT = st.lists(st.integers(256, 262), max_size=8)
RAW = whole_logits(candidates(np.int64(5), np.arange(CANDIDATES)), False, 2049)


@settings(max_examples=examples(150), deadline=None)
@given(PARAMS, OUTPUT, st.lists(IDS, min_size=1, max_size=5))
def test_logits_are_changed_as_for_a_model(params: LogitsParams, output: list[int], prompt: list[int]) -> None:
    controls = Controls(0.0, 1.0, 0, 0.0, 0, logits_params=params)
    rows, tokens = ProcessorRows(1), np.array([*prompt, *output], np.int32)
    rows.join(Join(0, tokens, len(prompt), controls))
    raw = torch.tensor(RAW, dtype=torch.float32)[None]
    expected = rows.apply(raw, np.zeros(1, np.int64), np.array([len(output)]))[0].numpy()
    row = ChangedRow(controls, np.array(prompt, np.int32), list(output))
    np.testing.assert_allclose(row.changed(RAW, len(output)), expected, rtol=1e-5)
    assert rows.asking[0] == (params.min_tokens > 0 and params.not_yet != ()) or changes_logits(params)
    if (expected == -np.inf).all():
        assert row.draw(RAW, len(output), 0.5) == NO_TOKEN


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from((0.0, 0.1, 0.7, 1.0, 2.0)),
    st.sampled_from((0.1, 0.5, 0.9, 1.0)),
    st.sampled_from((0, 1, 3, 30, 100)),
    st.sampled_from((0.0, 0.05, 0.4)),
)
def test_a_draw_has_the_tokens_that_a_models_sampler_leaves(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """The sampler's draws by many seeds are among those of positive probability, and the likeliest of these are met."""
    controls = Controls(temperature, top_p, top_k, min_p, 0)
    sums = cumulative(LOGITS, controls)
    shares = np.diff(sums, prepend=0.0)
    count = 400
    rows = SamplingRows(count)
    for seed in range(count):
        own = Controls(temperature, top_p, top_k, min_p, seed)
        rows.join(Join(seed, np.zeros(1, np.int32), 1, own))
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(count, -1).contiguous()
    drawn = sample(logits, rows, np.arange(count), np.zeros(count, np.int64)).tokens
    found = np.bincount(drawn, minlength=CANDIDATES) / count
    assert not found[shares == 0].any()
    assert np.abs(found - shares).max() < 0.1
    assert sums[-1] == 1.0


def test_a_request_without_controls_needs_no_whole_vocabulary() -> None:
    assert not changes_logits(NO_LOGITS_PARAMS)
    assert not changes_logits(LogitsParams(not_yet=(0,), min_tokens=3))
    assert changes_logits(LogitsParams(frequency=0.1))
