"""Draws without masks are those behind masks, to the bit: of few tokens that are checked, and among all tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from torch import Tensor

from model.cpu.kernels.logits import KernelOps
from model.inputs.grammar_backends import LLGUIDANCE
from model.sampling import few_tokens
from model.sampling.few_tokens import likeliest
from model.sampling.processor_rows import ProcessorRows
from model.sampling.random import gumbel, row_keys
from model.sampling.sampler import TORCH_OPS, Drawn, LogitOps, SamplingRows, sample
from model.sampling.sources import ProcessorSources
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import GrammarStore
from scheduler.controls import Controls, LogitsParams
from scheduler.step import Join
from scheduler.structured import Structured
from tests.support.examples import examples
from tests.support.grammar_backends import grammar, matcher
from tests.support.grammar_engine import Substrings
from tests.support.kernels import the_machine
from tests.support.planted import plant

VOCABULARY = LLTokenizer(Substrings(2000))  # type: ignore[arg-type] # it has what is asked
SIZE = VOCABULARY.vocab_size
SOURCES = ProcessorSources(grammars=GrammarStore(lambda: VOCABULARY))
TEXTS = [Structured.regex(text) for text in ("[a-z ]{3,40}", "[ -~]{2,9}[0-9]?", "(?s:.)*", "[ab]{3,30}c[a-z ]*")]
TEXTS += [Structured.json_schema({"type": "string", "maxLength": 30})]
OPS: list[LogitOps] = [TORCH_OPS, KernelOps(the_machine())]


@pytest.fixture(autouse=True)
def masks_count_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which draws are without masks must not depend on the machine."""
    monkeypatch.setattr(GrammarMask, "is_slow", True)


@dataclass(frozen=True)
class Row:
    """A row that draws behind some tokens of an output."""

    text: int
    controls: tuple[float, float, int, float, int]  # temperature, top_p, top_k, min_p, seed
    source: int  # seed of its tokens and logits


def allowed(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE])


def made(row: Row) -> tuple[list[int], Tensor]:
    """Returns the tokens before the draw, and its logits: among the likeliest some are allowed."""
    source, tokens = random.Random(row.source), list[int]()
    state = matcher(LLGUIDANCE, TEXTS[row.text], VOCABULARY)
    follow = allowed(np.frombuffer(state.compute_bitmask(), np.uint8))
    for _ in range(source.randrange(6)):
        token = int(source.choice(follow))
        if token == VOCABULARY.eos_token or not state.consume_token(token) or state.is_stopped():
            break
        tokens.append(token)
        follow = allowed(np.frombuffer(state.compute_bitmask(), np.uint8))
    rng = np.random.default_rng(row.source)
    logits = rng.normal(size=SIZE) * source.choice([0.5, 2.0, 4.0])
    logits[follow] += source.choice([0.0, 1.0, 5.0])
    if source.random() < 0.4:
        logits = np.round(logits)  # many ties
    return tokens, torch.tensor(logits, dtype=torch.float32)


def drawn(rows: Sequence[Row], ops: LogitOps, top_logprobs: int = -1) -> Drawn:
    controls = SamplingRows(len(rows), SOURCES)
    logits = torch.empty(len(rows), SIZE)
    for number, row in enumerate(rows):
        tokens, logits[number] = made(row)
        params = LogitsParams(grammar=grammar(LLGUIDANCE, TEXTS[row.text]))
        asked = Controls(*row.controls, top_logprobs=top_logprobs, logits_params=params)
        controls.join(Join(number, np.array([1, *tokens], np.int32), 1, asked))
    return sample(logits, controls, np.arange(len(rows)), np.arange(len(rows)), ops)


def masks_computed(monkeypatch: pytest.MonkeyPatch) -> list[GrammarMask]:
    computed = list[GrammarMask]()

    mask = GrammarMask.mask

    def counted(self: GrammarMask) -> Any:
        computed.append(self)
        return mask(self)

    monkeypatch.setattr(GrammarMask, "mask", counted)
    return computed


def same(rows: Sequence[Row], ops: LogitOps, top_logprobs: int = -1) -> bool:
    found = drawn(rows, ops, top_logprobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMask, "can_wait", lambda _: False)
        behind = drawn(rows, ops, top_logprobs)
    assert (found.tokens >= 0).all()
    parts = ("chosen", "rank", "top_ids", "top")
    return found.tokens.tolist() == behind.tokens.tolist() and all(
        getattr(found.logprobs, part).tobytes() == getattr(behind.logprobs, part).tobytes() for part in parts
    )


ROWS = st.builds(
    Row,
    st.integers(0, len(TEXTS) - 1),
    st.tuples(
        st.sampled_from([0.0, 0.3007, 0.8, 1.0, 1.9001]),
        st.sampled_from([1.0, 1.0, 0.1001, 0.4999, 0.9003]),
        st.sampled_from([0, 0, 1, 2, 5, 20, 64, 65, 10**6]),
        st.sampled_from([0.0, 0.0, 0.0503, 0.5009, 1.0]),
        st.integers(0, 2**64 - 1),
    ),
    st.integers(0, 2**32 - 1),
)
BATCHES = st.lists(ROWS, min_size=1, max_size=6)


@pytest.mark.parametrize("ops", OPS, ids=["torch", "kernels"])
@settings(max_examples=examples(60), deadline=None)
@given(rows=BATCHES, top_logprobs=st.sampled_from([-1, -1, 0, 3]))
def test_draws_are_those_behind_masks(ops: LogitOps, rows: list[Row], top_logprobs: int) -> None:
    assert same(rows, ops, top_logprobs)


CUTS = {"top_k": (0.8, 1.0, 20, 0.0), "min_p": (0.8, 1.0, 0, 0.05), "all three": (0.8, 0.95, 20, 0.05)}


@pytest.mark.parametrize("name", CUTS)
def test_they_compute_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(i % 3, (*CUTS[name], i), i) for i in range(60)]
    computed = masks_computed(monkeypatch)
    drawn(rows, TORCH_OPS)
    assert len(set(computed)) < len(rows) / 2


def test_top_p_alone_computes_each_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = masks_computed(monkeypatch)
    drawn([Row(0, (0.8, 0.9, 0, 0.0, i), i) for i in range(4)], TORCH_OPS)
    assert len(set(computed)) == 4


def only_the_first(likely: Callable[..., Any]) -> Callable[..., Any]:
    """Looks at too few tokens, and does not say so."""
    return lambda mask, values, tokens, *others: likely(mask, values[:9], tokens[:9], *others) or []


def k_of_all(likely: Callable[..., Any]) -> Callable[..., Any]:
    """Looks at the k likeliest tokens, allowed or not: behind a mask others take the places of forbidden ones."""
    return lambda mask, values, tokens, top_k, reach: (
        likely(mask, [*values[:top_k], float("-inf")], tokens[: top_k + 1], top_k, reach) or ([] if top_k else None)
    )


def near_the_forbidden(likely: Callable[..., Any]) -> Callable[..., Any]:
    """Takes min_p of the largest logit, allowed or not."""
    return lambda mask, values, tokens, top_k, reach: likely(
        mask, values, tokens, top_k, max(0.0, reach - values[0] + values[3])
    )


@pytest.mark.parametrize("fault", [only_the_first, k_of_all, near_the_forbidden])
def test_the_law_catches_a_wrong_check(
    fault: Callable[[Callable[..., Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, few_tokens, "refused", fault)
    batches = [[Row(i % len(TEXTS), (*cut, i), i) for i in range(100)] for cut in CUTS.values()]
    with pytest.raises(AssertionError):
        assert all(same(rows, TORCH_OPS) for rows in batches)


NEAR = 4000


def near_ties() -> bool:
    """Whether draws among two tokens, which are equal with their noise but for rounding, are those behind a mask.

    A third, forbidden token has the largest logit. So scaled logits are rounded otherwise behind the mask.
    """
    text, tokens = Structured.regex("[ab]{9}[a-z]{9}"), [ord(letter) for letter in "abc"]
    params = LogitsParams(grammar=grammar(LLGUIDANCE, text))
    rows, controls = np.zeros(NEAR, np.int64), SamplingRows(1, SOURCES)
    controls.join(Join(0, np.ones(1, np.int32), 1, Controls(0.7003, 1.0, 0, 0.0, 5, logits_params=params)))
    positions = np.arange(NEAR)
    keys = row_keys(np.full(NEAR, 5, np.uint64), np.zeros(NEAR, np.int64), positions)
    noise = gumbel(torch.from_numpy(keys), torch.tensor(tokens))
    logits = torch.full((NEAR, SIZE), -1000.0)
    logits[:, tokens[0]] = torch.linspace(0.1, 0.9, NEAR)
    logits[:, tokens[1]] = (logits[:, tokens[0]].double() + 0.7003 * (noise[:, 0] - noise[:, 1])).float()
    logits[:, tokens[2]] = torch.maximum(logits[:, tokens[0]], logits[:, tokens[1]]) + 0.3
    makes = [sample(logits.clone(), controls, rows, positions, OPS[1]).tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMask, "can_wait", lambda _: False)
        makes.append(sample(logits.clone(), controls, rows, positions, OPS[1]).tokens)
    return bool((makes[0] == makes[1]).all())


def test_rounding_is_that_behind_masks() -> None:
    assert near_ties()


def test_the_law_catches_a_draw_that_is_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws_alone(refused: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, rows, tokens, _, late: refused(self, rows, tokens, tokens, late)

    plant(monkeypatch, ProcessorRows, "refused", draws_alone)
    assert not near_ties()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_the_likeliest_are_those_of_a_sort(width: int, count: int, seed: int, ties: bool) -> None:
    logits = torch.randn(3, width * 7, generator=torch.Generator().manual_seed(seed))
    logits = torch.round(logits) if ties else logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_tokens, "BLOCK", 8)
        values, ids = likeliest(logits, count)
    assert torch.equal(values, torch.sort(logits, -1, descending=True).values[:, :count])
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
