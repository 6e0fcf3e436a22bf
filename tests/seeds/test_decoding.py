"""Pages, steps and limits of real sequences as they are decoded, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from model.forward import ForwardBatch, ForwardOutput
from model.reference.row_pool import RowPool
from scheduler.events import EndReason, Submit
from scheduler.invalid import InvalidRequest
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from tests.support.checkpoints import greedy_ids, write, write_llama
from tests.support.engines import Rig, make_request, make_rig
from tests.support.pages import exported

CONTEXT = 1024
HEADS, KV_HEADS, LAYERS = 8, 2, 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return write_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=CONTEXT, **shape)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 320, length).tolist()


def rig_of(directory: Path, page_size: int = 16, depth: int = 1) -> Rig:
    return make_rig(directory, page_size, 2048, SchedulerSettings(steps_in_flight=depth), prefix_cache=False)


def stopping_at(rig: Rig, prompt: list[int], token: int) -> Request:
    return replace(make_request(rig, prompt, 40), stop_ids=(token,))


# Pages


def test_the_most_pages_that_were_held_are_remembered(llama: Path) -> None:
    rig = rig_of(llama, page_size=4)
    most = 0
    for attempt, (prompt, new) in enumerate([(30, 9), (5, 3)]):
        events = [Submit(attempt, make_request(rig, prompt_of(prompt), new))]
        while (outputs := rig.turn(events)) is not None:
            events = []
            most = max(most, -(-(prompt + len(rig.results[attempt].tokens) - 1) // 4))
            assert outputs.stats.pages_peak == most
    assert most == -(-(30 + 9 - 1) // 4), "of the longer one, also while the shorter one runs"
    assert outputs is None
    assert rig.scheduler.stats().page_bytes == rig.loaded.layout.page_bytes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_pages_in_use_are_those_of_the_tokens_held(llama: Path, page_size: int, depth: int) -> None:
    """Prompt + generated - 1 tokens are held, and one more where a step is in flight: the last token is never fed."""
    rig = rig_of(llama, page_size, depth)
    lengths = {0: (33, 30), 1: (1, 12), 2: (16, 20), 3: (13, 45)}
    events = [Submit(i, make_request(rig, prompt_of(prompt), new)) for i, (prompt, new) in lengths.items()]
    looked_at, beside_a_step = 0, 0
    while (outputs := rig.turn(events)) is not None:
        events = []
        in_flight = rig.in_flight
        assert in_flight < depth
        running = [i for i, result in rig.results.items() if result.end is None]
        held = [lengths[i][0] + len(rig.results[i].tokens) - 1 for i in running]
        if not rig.results:
            continue  # the first step, with all prompts, is in flight
        assert outputs.stats.pages_used == sum(-(-(tokens + in_flight) // page_size) for tokens in held)
        assert outputs.stats.pages_used <= sum(-(-tokens // page_size) for tokens in held) + in_flight * len(held)
        assert outputs.stats.slots_unused <= (page_size - 1) * len(held), "less than a page of a request is waste"
        looked_at, beside_a_step = looked_at + len(held), beside_a_step + in_flight
    assert {i: len(result.tokens) for i, result in rig.results.items()} == {i: new for i, (_, new) in lengths.items()}
    assert looked_at == sum(new - 1 for _, new in lengths.values())
    assert (beside_a_step > 0) == (depth == 2)


def test_a_short_sequence_does_not_hold_the_context(llama: Path) -> None:
    """32 tokens of a context of 1,024: a cache as long as the context would be 3 % in use."""
    rig = rig_of(llama)
    events = [Submit(0, make_request(rig, prompt_of(4), 40))]
    while len(rig.results[0].tokens if rig.results else ()) < 29:
        outputs = rig.turn(events)
        events = []
    assert outputs is not None
    held = 4 + 29 - 1
    assert held / rig.loaded.config.context < 0.04
    assert held == outputs.stats.pages_used * 16
    assert outputs.stats.slots_unused == 0


def memory(rig: Rig) -> torch.Tensor:
    """The pool's bytes, [pages, bytes of a page]."""
    pool: RowPool = rig.loaded.runner.attention.pool  # type: ignore[attr-defined]
    return pool.pages


def test_a_decode_writes_one_slot_a_layer_into_a_pool_that_stays(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of the KV heads and nothing else; no tensor of the pool is made anew, however long a sequence gets."""
    rig, (prompt, new) = rig_of(llama, page_size=7), (50, 100)
    written: list[int] = []
    store = RowPool.write

    def counted(self: RowPool, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert keys.shape == values.shape == (len(places), KV_HEADS, 64 // HEADS)
        written.append(len(places))
        store(self, layer, places, keys, values)

    def never(self: RowPool, pages: object) -> None:
        raise AssertionError("pages were copied")

    monkeypatch.setattr(RowPool, "write", counted)
    monkeypatch.setattr(RowPool, "copy", never)
    before = memory(rig).data_ptr()
    rig.run({0: make_request(rig, prompt_of(prompt), new)})
    assert written == [prompt] * LAYERS + [1] * (LAYERS * (new - 1))
    assert memory(rig).data_ptr() == before
    pages = rig.loaded.pages + 1  # one page is the runner's own
    assert memory(rig).shape == (pages, 7 * LAYERS * 2 * KV_HEADS * (64 // HEADS) * 4)


@pytest.fixture(scope="module")
def for_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads are wide enough for the kernels of the CPU."""
    return write_llama(tmp_path_factory.mktemp("kernels"), max_position_embeddings=CONTEXT)


@pytest.mark.parametrize("page_size", [7, 16])
def test_a_decode_by_kernels_writes_one_slot_a_layer(for_kernels: Path, page_size: int) -> None:
    rig = make_rig(for_kernels, page_size, 2 * CONTEXT, backend="cpu", poison=False)
    attention, layers = rig.loaded.runner.attention, rig.loaded.config.layers
    rig.turn([Submit(1, make_request(rig, prompt_of(50), 100))])

    def content() -> torch.Tensor:
        """[layers x 2, tokens, elements of a token]."""
        pages = exported(attention, range(rig.loaded.pages)).view(torch.float32)
        shape = (rig.loaded.pages, 2 * layers, page_size, -1)
        return pages.view(shape).transpose(0, 1).flatten(1, 2)

    for _ in range(20):
        before = content()
        rig.turn()
        changed = (content() != before).any(-1)
        assert changed.sum(1).tolist() == [1] * 2 * layers
        assert (changed == changed[0]).all()


def test_reading_a_long_past_takes_no_memory(for_kernels: Path) -> None:
    """Torch allocates as much in a decode after 900 tokens as after 20; the reference needs a copy of them."""

    def allocated(backend: str, length: int) -> int:
        rig = make_rig(for_kernels, 16, 2 * CONTEXT, SchedulerSettings(1024, 8), backend=backend, poison=False)
        rig.turn([Submit(1, make_request(rig, prompt_of(length), 100))])
        rig.turn()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            rig.turn()
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    assert allocated("cpu", 900) == allocated("cpu", 20)
    assert allocated("reference", 900) > 2 * allocated("reference", 20)


def test_keys_are_not_repeated_for_the_queries_that_share_them(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(llama)
    shapes: list[tuple[int, ...]] = []
    product = torch.bmm

    def seen(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.append(tuple(right.shape))
        return product(left, right, **options)

    rig.run({0: make_request(rig, prompt_of(5), 1)})
    monkeypatch.setattr(torch, "bmm", seen)
    rig.run({1: make_request(rig, prompt_of(1), 9)})
    assert {shape[0] for shape in shapes} == {KV_HEADS}, f"one block of keys for each of {KV_HEADS} heads, not {HEADS}"
    assert len(shapes) == 2 * LAYERS * 9


# Steps


def greedy(llama: Path, prompt: list[int], new: int) -> list[int]:
    rig = rig_of(llama)
    return rig.run({0: make_request(rig, prompt, new)})[0].tokens


def an_end(tokens: list[int]) -> int:
    """Returns the last place at which a token comes for the first time."""
    return max(i for i, token in enumerate(tokens) if token not in tokens[:i])


def test_a_sequence_that_ends_frees_its_pages_in_that_step(llama: Path) -> None:
    prompt = prompt_of(20)
    tokens = greedy(llama, prompt, 16)
    last = an_end(tokens)
    assert last >= 4
    rig = rig_of(llama)
    events = [Submit(0, stopping_at(rig, prompt, tokens[last]))]
    ends: tuple = ()
    while not ends:
        outputs = rig.turn(events)
        assert outputs is not None
        events, ends = [], outputs.ends
    assert [(end.reason, end.stop_token_id) for end in ends] == [(EndReason.STOP, tokens[last])]
    assert rig.results[0].tokens == tokens[: last + 1]
    stats = outputs.stats
    assert (stats.pages_used, stats.running) == (0, 0)
    assert stats.steps == last + 1, "a step a token"
    assert stats.computed_tokens == len(prompt) + last, "the last token is never fed"
    assert not rig.scheduler.has_work
    assert rig.turn() is None


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_computes_for_a_sequence_that_has_ended(llama: Path, depth: int) -> None:
    """Beside another that goes on. With two steps in flight one has begun when the end token is seen, and no more."""
    prompt, other = prompt_of(20), prompt_of(9)
    tokens = greedy(llama, prompt, 16)
    last = an_end(tokens)
    rig = rig_of(llama, depth=depth)
    rig.run({0: stopping_at(rig, prompt, tokens[last]), 1: make_request(rig, other, 40)})
    assert rig.results[0].tokens == tokens[: last + 1]
    needed = len(prompt) + last + len(other) + 40 - 1
    assert rig.scheduler.stats().computed_tokens - needed == depth - 1
    assert rig.scheduler.stats().steps == 40


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_no_decode_is_run_after_the_last_token(llama: Path, depth: int, new: int) -> None:
    rig = rig_of(llama, depth=depth)
    rig.run({0: make_request(rig, prompt_of(10), new)})
    stats = rig.scheduler.stats()
    assert (stats.steps, stats.computed_tokens) == (new, 10 + new - 1)


# The end of the context


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learned positions: a table of 48, beyond which there is nothing to look up."""
    shape = {"max_position_embeddings": 48, "num_hidden_layers": LAYERS}
    return write(GPT2Config, tmp_path_factory.mktemp("gpt2"), **shape)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 20, 46, 47])
def test_generation_up_to_the_context_ends_with_length(gpt2: Path, length: int, depth: int) -> None:
    rig, prompt = rig_of(gpt2, depth=depth), prompt_of(length)
    result = rig.run({0: make_request(rig, prompt, None)})[0]
    assert result.end is not None
    assert result.end.reason is EndReason.LENGTH
    assert result.tokens == greedy_ids(gpt2, [prompt], 48 - length)[0]


@pytest.mark.parametrize(("length", "new"), [(20, 29), (47, 2), (48, None), (48, 1), (100, 1)])
def test_what_goes_beyond_the_context_is_refused_at_the_door(gpt2: Path, length: int, new: int | None) -> None:
    rig = rig_of(gpt2)
    with pytest.raises(InvalidRequest, match="48") as caught:
        make_request(rig, prompt_of(length), new)
    assert caught.value.field == ("token_ids" if length >= 48 else "stopping.max_tokens")


# No training


def test_nothing_is_kept_for_gradients(llama: Path) -> None:
    rig = rig_of(llama)
    modes: list[tuple[bool, bool]] = []

    class Watched:
        def __init__(self, model: Any) -> None:
            self._model = model

        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            output: ForwardOutput = self._model.forward(batch)
            modes.append((torch.is_inference_mode_enabled(), output.logits.requires_grad))
            return output

    rig.wrap_model(Watched)
    rig.run({0: make_request(rig, prompt_of(5), 3)})
    assert modes == [(True, False)] * 3
    assert not memory(rig).requires_grad
