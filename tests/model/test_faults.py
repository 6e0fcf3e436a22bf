"""Law: no request can hurt another. An error or NaN that one sequence causes in the model ends that sequence alone."""

import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.forward import ForwardBatch, ForwardOutput, Model
from scheduler.events import EndReason, Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.support.engines import Rig, make_request, make_rig

pytestmark = pytest.mark.sample(3)

NEW = 10
LENGTHS = [3, 17, 1, 9, 30, 5, 12, 2, 40, 7, 8, 21]
BAD = 319  # in no prompt or output unless put there


class Raising:
    """A model that raises whenever one of these tokens is in its input. calls: how often it was asked."""

    def __init__(self, model: Model, bad: set[int]) -> None:
        self.model, self.bad, self.calls = model, torch.tensor(sorted(bad)), 0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.calls += 1
        if torch.isin(batch.tokens, self.bad).any():
            raise ArithmeticError("bad token")
        return self.model.forward(batch)


class Spoiling:
    """A model whose logits hold one value that is not finite after each of these tokens."""

    def __init__(self, model: Model, bad: set[int], value: float) -> None:
        self.model, self.bad, self.value = model, torch.tensor(sorted(bad)), value

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        output = self.model.forward(batch)
        output.logits[torch.isin(batch.tokens[batch.wanted], self.bad), 5] = self.value
        return output


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, vocabulary=BAD, seed=8)


@pytest.fixture(scope="module")
def healthy(tiny: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of all requests where none faults."""
    rig = make_rig(tiny)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    outputs = [rig.results[i].tokens for i in range(len(prompts))]
    assert not any(BAD in tokens for tokens in (*prompts, *outputs))
    return outputs


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The runner logs a traceback for every fault, as it should."""
    logger = logging.getLogger("quire.runner")
    logger.disabled = True
    yield
    logger.disabled = False


SETTINGS = {
    "one step in flight": SchedulerSettings(max_sequences=32),
    "two steps in flight": SchedulerSettings(max_sequences=32, steps_in_flight=2),
    "chunks, two in flight": SchedulerSettings(
        max_sequences=5, max_batched_tokens=16, prefill_chunk=4, steps_in_flight=2
    ),
}
each_setting = pytest.mark.parametrize("scheduling", SETTINGS.values(), ids=SETTINGS)


def run_with_bad_prompts(
    rig: Rig, prompts: list[list[int]], bad: dict[int, int], healthy: list[list[int]]
) -> list[str]:
    """bad: place of BAD in the prompt of each of these attempts. Checks the ends of all and returns the messages."""
    changed = [list(prompt) for prompt in prompts]
    for attempt, place in bad.items():
        changed[attempt][place] = BAD
    results = rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(changed)})
    for i, expected in enumerate(healthy):
        end = results[i].end
        assert end is not None
        assert end.reason is (EndReason.FAULT if i in bad else EndReason.LENGTH)
        assert results[i].tokens == ([] if i in bad else expected)
    return [results[i].end.message for i in bad]  # type: ignore[union-attr]


@each_setting
@pytest.mark.parametrize(
    "bad",
    [{4: 0}, {4: 29}, {0: 1}, {11: 20}, {2: 0, 3: 4, 4: 15}, dict.fromkeys(range(0, 12, 2), 0)],
    ids=str,
)
def test_a_prompt_that_makes_the_model_raise_ends_alone(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings, bad: dict[int, int]
) -> None:
    rig = make_rig(tiny, settings=scheduling)
    rig.wrap_model(lambda model: Raising(model, {BAD}))
    for message in run_with_bad_prompts(rig, prompts, bad, healthy):
        assert message == "ArithmeticError while computing this sequence"


@each_setting
def test_when_all_raise_all_end(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings
) -> None:
    rig = make_rig(tiny, settings=scheduling)
    rig.wrap_model(lambda model: Raising(model, {BAD}))
    run_with_bad_prompts(rig, prompts, dict.fromkeys(range(len(prompts)), 0), healthy)


@each_setting
def test_an_engine_serves_on_after_faults(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings
) -> None:
    """Rows and pages of the ended are used again; nothing of the fault stays in them."""
    rig = make_rig(tiny, settings=scheduling, pool_tokens=192)
    rig.wrap_model(lambda model: Raising(model, {BAD}))
    run_with_bad_prompts(rig, prompts, {1: 0, 8: 33}, healthy)
    again = rig.run({100 + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    assert [again[100 + i].tokens for i in range(len(prompts))] == healthy


def own_token(healthy: list[list[int]], prompts: list[list[int]]) -> tuple[int, int, int]:
    """(attempt, place, token) of an output token, not the last, that no other request ever feeds to the model."""
    for attempt, tokens in enumerate(healthy):
        others = {t for i in range(len(prompts)) if i != attempt for t in (*prompts[i], *healthy[i])}
        for place, token in enumerate(tokens[:-1]):
            if place and token not in others and token not in prompts[attempt] and tokens.index(token) == place:
                return attempt, place, token
    raise AssertionError("no such token: choose another seed")


@each_setting
def test_a_drawn_token_that_makes_the_model_raise_ends_alone(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings
) -> None:
    attempt, place, token = own_token(healthy, prompts)
    rig = make_rig(tiny, settings=scheduling)
    rig.wrap_model(lambda model: Raising(model, {token}))
    results = rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    for i, expected in enumerate(healthy):
        end = results[i].end
        assert end is not None
        assert end.reason is (EndReason.FAULT if i == attempt else EndReason.LENGTH)
        assert results[i].tokens == (expected[: place + 1] if i == attempt else expected)


@each_setting
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_sequence_alone(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings, value: float
) -> None:
    rig = make_rig(tiny, settings=scheduling)
    rig.wrap_model(lambda model: Spoiling(model, {BAD}, value))
    last = {i: LENGTHS[i] - 1 for i in (0, 2, 8)}
    for message in run_with_bad_prompts(rig, prompts, last, healthy):
        assert message == "the model's logits are not finite"


def test_a_result_has_no_token_where_a_row_faulted(tiny: Path) -> None:
    """One draws, one raises, one draws from NaN: what the executor says of each, before the scheduler has a say."""
    rig = make_rig(tiny, settings=SchedulerSettings(max_sequences=8))
    rig.wrap_model(lambda model: Raising(Spoiling(model, {BAD}, float("nan")), {BAD - 1}))
    submits = [Submit(i, make_request(rig, [3, last], NEW)) for i, last in enumerate((7, BAD - 1, BAD))]
    plan = rig.scheduler.schedule(0.0, submits)
    assert plan is not None
    rig.loaded.runner.launch(plan)
    result = rig.loaded.runner.collect()
    rows = plan.logits[:, 1].tolist()
    assert (result.step, result.tokens[0] >= 0) == (plan.step, True)
    assert result.tokens[1:].tolist() == [-1, -1]
    assert sorted(result.faults) == sorted(
        [
            (rows[1], "ArithmeticError while computing this sequence"),
            (rows[2], "the model's logits are not finite"),
        ]
    )


@each_setting
def test_not_finite_in_the_middle_of_an_output(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], scheduling: SchedulerSettings
) -> None:
    attempt, place, token = own_token(healthy, prompts)
    rig = make_rig(tiny, settings=scheduling)
    rig.wrap_model(lambda model: Spoiling(model, {token}, float("nan")))
    results = rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    assert [results[i].tokens for i in range(len(prompts)) if i != attempt] == [
        tokens for i, tokens in enumerate(healthy) if i != attempt
    ]
    assert results[attempt].tokens == healthy[attempt][: place + 1]
    assert results[attempt].end.reason is EndReason.FAULT  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 64])
@pytest.mark.parametrize("bad", ["first", "middle", "last"])
def test_one_bad_row_is_found_in_logarithmic_time(tiny: Path, count: int, bad: str) -> None:
    rig = make_rig(tiny, settings=SchedulerSettings(max_sequences=64))
    models: list[Raising] = []

    def wrap(model: Model) -> Model:
        models.append(Raising(model, {BAD}))
        return models[0]

    rig.wrap_model(wrap)
    place = {"first": 0, "middle": count // 2, "last": count - 1}[bad]
    rig.run({i: make_request(rig, [BAD if i == place else 7], 1) for i in range(count)})
    halvings, probe = (count - 1).bit_length(), count == 1
    assert models[0].calls <= 1 + 2 * halvings + probe
    assert sum(result.end.reason is EndReason.FAULT for result in rig.results.values()) == 1  # type: ignore[union-attr]


class Broken:
    """A device that computes a number of steps and nothing after them."""

    def __init__(self, model: Model, steps: int, value: float | None) -> None:
        self.model, self.left, self.value = model, steps, value

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.left -= 1
        if self.left >= 0:
            return self.model.forward(batch)
        if self.value is None:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return ForwardOutput(self.model.forward(batch).logits.fill_(self.value))


@pytest.mark.parametrize(("value", "part"), [(None, "device-side assert"), (float("nan"), "not finite")])
def test_a_device_that_fails_is_not_blamed_on_the_requests(
    tiny: Path, prompts: list[list[int]], value: float | None, part: str
) -> None:
    """The engine ends, so that its requests can go on elsewhere, where a fault would be their end."""
    rig = make_rig(tiny)
    rig.wrap_model(lambda model: Broken(model, 3, value))
    with pytest.raises(RuntimeError, match=part):
        rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    assert all(result.end is None for result in rig.results.values())


def test_a_step_that_raises_only_as_a_whole_hurts_nobody(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]]
) -> None:
    """Out of memory on a large batch, say: the halves fit."""

    class Small:
        def __init__(self, model: Model) -> None:
            self.model = model

        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            if len(batch.tokens) > 45:
                raise MemoryError
            return self.model.forward(batch)

    rig = make_rig(tiny, record_logits=True)
    rig.wrap_model(Small)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    assert [rig.results[i].tokens for i in range(len(prompts))] == healthy


def test_a_pass_that_raised_holds_no_memory_when_its_halves_run(
    tiny: Path, prompts: list[list[int]], healthy: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its activations would be in the way where memory ran out. And one line of the log says it, not one a half."""
    held = list[weakref.ref[Tensor]]()

    class Large:
        def __init__(self, model: Model) -> None:
            self.model = model

        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            assert [one for one in held if one() is not None] == []
            if len(batch.tokens) > 11:
                activations = torch.ones(len(batch.tokens), 1000)
                held.append(weakref.ref(activations))
                raise MemoryError(activations.shape)
            return self.model.forward(batch)

    logging.getLogger("quire.runner").disabled = False
    rig = make_rig(tiny)
    rig.wrap_model(Large)
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) <= 11]
    rig.run({i: make_request(rig, prompts[i], NEW) for i in chosen})
    assert [rig.results[i].tokens for i in chosen] == [healthy[i] for i in chosen]
    said = [one for one in caplog.records if "running it in halves" in one.message]
    assert 0 < len(said) < len(held)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_faulted_row_is_not_fed_a_token_that_does_not_exist(
    tiny: Path, prompts: list[list[int]], steps_in_flight: int
) -> None:
    """With two steps in flight the next step of a row is planned before its fault is known. An id outside of the
    vocabulary is an exception on the CPU, but on a CUDA device an assertion that ends the whole engine.
    """
    seen: set[int] = set()

    class Watching(Spoiling):
        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            seen.update(batch.tokens.tolist())
            return super().forward(batch)

    rig = make_rig(tiny, settings=SchedulerSettings(max_sequences=8, steps_in_flight=steps_in_flight))
    rig.wrap_model(lambda model: Watching(model, {BAD}, float("nan")))
    rig.run({0: make_request(rig, prompts[0], NEW), 1: make_request(rig, [3, BAD], NEW)})
    assert min(seen) >= 0
