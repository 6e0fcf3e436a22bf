"""Logits processors of a user's own: what they see, what they change; one that fails ends its request alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling import logits_processors
from model.sampling.logits_processors import LogitsProcessor, LogitsProcessorFactory, load_factories
from scheduler.events import EndReason, Submit
from scheduler.invalid import InvalidRequest
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import random_prompts
from tests.support.checkpoints import write_llama
from tests.support.engines import Rig, make_request, make_rig

VOCABULARY, NEW = 320, 12
PROMPTS = random_prompts([5, 20, 3, 11], seed=4)
MARKED = 7  # a prompt that begins with this asks for the processor
TIGHT = SchedulerSettings(max_sequences=3, max_batched_tokens=11, prefill_chunk=5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


class NoRepeats:
    """No token twice in an output: what it allows depends on all tokens so far."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.drawn: list[int] = []

    def drew(self, token: int) -> None:
        self.drawn.append(token)

    def apply(self, logits: Tensor, position: int) -> Tensor:
        assert position == len(self.drawn)
        return logits.index_fill(0, torch.tensor(self.drawn, dtype=torch.int64), -torch.inf)


class Failing:
    """Does what a test says at the third draw."""

    def __init__(self, fail: Callable[[Tensor], object], at_draws: bool = False) -> None:
        self.fail, self.at_draws, self.tokens, self.calls = fail, at_draws, 0, 0

    def drew(self, token: int) -> None:
        self.tokens += 1
        if self.at_draws and self.tokens == 2:
            self.fail(torch.zeros(0))

    def apply(self, logits: Tensor, position: int) -> Tensor:
        self.calls += 1
        return self.fail(logits) if position == 2 and not self.at_draws else logits  # type: ignore[return-value]


def tokens_of(rig: Rig, prompts: list[list[int]], **sampling: float) -> list[list[int]]:
    results = rig.run({i: make_request(rig, prompt, NEW, **sampling) for i, prompt in enumerate(prompts)})
    return [results[i].tokens for i in range(len(prompts))]


def of_marked(make: LogitsProcessorFactory) -> LogitsProcessorFactory:
    """For prompts that begin with `MARKED`; no other sequence has a processor."""

    def marked(prompt: NDArray[np.int32]) -> LogitsProcessor | None:
        return make(prompt) if prompt[0] == MARKED else None

    return marked


@pytest.mark.parametrize(
    "drawing", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4, "seed": 5}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
def test_it_sees_all_tokens_and_changes_the_draw(llama: Path, drawing: dict[str, float], ahead: bool) -> None:
    """Under preemption too: a request that goes on gets a new processor with the tokens so far."""
    plain = tokens_of(make_rig(llama), PROMPTS, **drawing)
    assert any(len(set(tokens)) < NEW for tokens in plain), "without it there are repeats"
    roomy = tokens_of(make_rig(llama, factories=[NoRepeats], ahead=ahead), PROMPTS, **drawing)
    assert all(len(set(tokens)) == NEW for tokens in roomy)
    tight = make_rig(llama, 4, 40, TIGHT, factories=[NoRepeats], ahead=ahead)
    assert tokens_of(tight, PROMPTS, **drawing) == roomy
    assert tight.preemptions


def test_a_sequence_that_has_none_is_left_alone(llama: Path) -> None:
    prompts = [[MARKED, *PROMPTS[0]], *PROMPTS[1:]]
    plain, found = (tokens_of(make_rig(llama, factories=made), prompts) for made in ((), [of_marked(NoRepeats)]))
    assert len(set(found[0])) == NEW
    assert found[1:] == plain[1:]


def test_they_apply_in_their_order(llama: Path) -> None:
    rig = make_rig(llama, factories=[lambda _: OneToken(3), lambda _: OneToken(9)])
    assert tokens_of(rig, PROMPTS[:1]) == [[9] * NEW]


class Compiling:
    """A factory that is ready for a marked prompt once it was asked some times, anew after each processor it made."""

    def __init__(self, asks: int) -> None:
        self.asks, self.asked, self.made = asks, Counter[bytes](), 0

    def ready(self, prompt: NDArray[np.int32]) -> bool:
        self.asked[prompt.tobytes()] += 1
        return self._has(prompt)

    def _has(self, prompt: NDArray[np.int32]) -> bool:
        return prompt[0] != MARKED or self.asked[prompt.tobytes()] > self.asks

    def __call__(self, prompt: NDArray[np.int32]) -> LogitsProcessor:
        assert self._has(prompt), "it is to make a processor that it cannot make yet"
        self.asked[prompt.tobytes()] = 0
        self.made += int(prompt[0] == MARKED)
        return NoRepeats(prompt)


@pytest.mark.parametrize(("ahead", "ranks"), [(False, 1), (True, 1), (False, 2)], ids=["host", "ahead", "two ranks"])
@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 4, "seed": 5}])
def test_one_that_is_not_ready_waits_alone(llama: Path, drawing: dict[str, float], ahead: bool, ranks: int) -> None:
    """Its tokens are those of one that was ready from the start, also where it is preempted and waits once more."""
    prompts = [[MARKED, *PROMPTS[0]], *PROMPTS[1:]]
    plain = tokens_of(make_rig(llama, factories=[NoRepeats]), prompts, **drawing)
    slow = Compiling(9)
    rig = make_rig(llama, factories=[slow], ahead=ahead, ranks=ranks)
    requests = [Submit(i, make_request(rig, prompt, NEW, **drawing)) for i, prompt in enumerate(prompts)]
    for events in [requests, *[[]] * 7]:
        rig.turn(events)
        assert 0 not in rig.results
    assert all(len(rig.results[i].tokens) > 4 for i in (1, 2, 3)), "the others go on"
    results = rig.play({})
    assert [results[i].tokens for i in range(4)] == plain
    assert slow.made == 1
    settings = replace(TIGHT, steps_in_flight=2 if ahead else 1)
    tight = make_rig(llama, 4, 40, settings, factories=[again := Compiling(3)], ahead=ahead, ranks=ranks)
    marked = [[MARKED, *prompt] for prompt in PROMPTS]
    assert tokens_of(tight, marked, **drawing) == tokens_of(make_rig(llama, factories=[NoRepeats]), marked, **drawing)
    assert tight.preemptions
    assert again.made == 4 + tight.preemptions


def test_sequences_of_one_prompt_wait_together(llama: Path) -> None:
    def tokens(factory: LogitsProcessorFactory) -> list[list[int]]:
        rig = make_rig(llama, factories=[factory])
        results = rig.run({0: make_request(rig, [MARKED, 5], NEW, temperature=1.0, sequence_count=3, seed=3)})
        return [results[key].tokens for key in (0, (0, 1), (0, 2))]

    class Once(Compiling):
        def __call__(self, prompt: NDArray[np.int32]) -> LogitsProcessor:
            self.made += 1
            return NoRepeats(prompt)

    slow = Once(5)
    assert tokens(slow) == tokens(NoRepeats)
    assert slow.made == 3


class Only:
    """A factory of processors that allow one token, which the request says."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ready(self, prompt: NDArray[np.int32], token: int = 3) -> bool:
        self.asked.append(token)
        return True

    def __call__(self, prompt: NDArray[np.int32], token: int = 3) -> LogitsProcessor:
        return OneToken(token)


class OneToken:
    def __init__(self, token: int) -> None:
        self.token = token

    def drew(self, token: int) -> None: ...

    def apply(self, logits: Tensor, position: int) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(self.token), 0.0)


def test_a_request_has_arguments_for_it(llama: Path) -> None:
    """They come anew with each join. Others have the factory's defaults."""
    rig = make_rig(llama, 4, 40, TIGHT, factories=[factory := Only()])
    given = [(("Only", f'{{"token": {i}}}'),) for i in range(4)] + [()]
    requests = {i: make_request(rig, PROMPTS[i % 4], NEW, logits_processors_args=args) for i, args in enumerate(given)}
    results = rig.run(requests)
    assert [results[i].tokens for i in range(5)] == [[token] * NEW for token in (0, 1, 2, 3, 3)]
    assert rig.preemptions
    assert set(factory.asked) == {0, 1, 2, 3}


def test_arguments_that_it_does_not_take_end_the_request_alone(llama: Path) -> None:
    rig = make_rig(llama, factories=[NoRepeats])
    wrong = make_request(rig, PROMPTS[0], NEW, logits_processors_args=(("NoRepeats", '{"secret": 5}'),))
    results = rig.run({0: wrong, 1: make_request(rig, PROMPTS[1], NEW)})
    end = results[0].end
    assert end is not None
    assert (end.reason, end.message) == (EndReason.FAULT, "logits processor NoRepeats raised TypeError")
    assert len(results[1].tokens) == NEW


def test_arguments_for_one_that_is_not_there_are_refused(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Other.* is no logits processor of this server, which has NoRepeats"):
        make_request(make_rig(llama, factories=[NoRepeats]), PROMPTS[0], logits_processors_args=(("Other", "{}"),))


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0.0, "Never raised KeyError"),
        (2.0, "Never took 2.0 s in one call, may take 1 s"),
        (0.3, "Never was not ready within 60 s"),
    ],
    ids=["raises", "slow", "never"],
)
def test_one_that_never_is_ready_ends_its_request_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, message: str
) -> None:
    clock = [0.0]

    class Never(Compiling):
        def ready(self, prompt: NDArray[np.int32]) -> bool:
            if prompt[0] != MARKED:
                return True
            clock[0] += seconds
            if not seconds:
                raise KeyError("secret words of the prompt")
            return False

    prompts = [[MARKED, *PROMPTS[0]], *PROMPTS[1:]]
    plain, rig = tokens_of(make_rig(llama, factories=[NoRepeats]), prompts), make_rig(llama, factories=[Never(0)])
    assert rig.loaded.readiness is not None
    monkeypatch.setattr(rig.loaded.readiness, "clock", lambda: clock[0])
    assert tokens_of(rig, prompts[1:]) == plain[1:]
    results = rig.run({9: make_request(rig, prompts[0], NEW)})
    end = results[9].end
    assert end is not None
    assert (end.reason, end.message) == (EndReason.FAULT, f"logits processor {message}")


def _raise(_: Tensor) -> object:
    raise KeyError("secret words of the prompt")


def _slow(clock: list[float]) -> Callable[[Tensor], object]:
    def wait(logits: Tensor) -> object:
        clock[0] += 60
        return logits

    return wait


@pytest.mark.parametrize("at_draws", [False, True], ids=["apply", "drew"])
@pytest.mark.parametrize("ahead", [False, True], ids=["host draws", "device draws"])
@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (_raise, "logits processor {name} raised KeyError"),
        (None, "logits processor {name} took 60.0 s in one call, may take 1 s"),
        (lambda logits: logits[:5], "logits processor {name} returned [5], must be [320]"),
        (lambda _: None, "logits processor {name} returned NoneType, must be [320]"),
        (lambda logits: logits.log() * torch.nan, "logits processor {name} returned NaN"),
    ],
    ids=["raises", "slow", "short", "nothing", "nan"],
)
def test_one_that_fails_ends_its_request_alone(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[Tensor], object] | None,
    message: str,
    at_draws: bool,
    ahead: bool,
) -> None:
    if at_draws and fail not in (_raise, None):
        pytest.skip("what `drew` returns is not looked at")
    clock, made = [0.0], list[Failing]()
    monkeypatch.setattr(logits_processors.time, "perf_counter", lambda: clock[0])

    def failing(prompt: NDArray[np.int32]) -> LogitsProcessor:
        made.append(Failing(fail or _slow(clock), at_draws))
        return made[-1]

    prompts = [[MARKED, *PROMPTS[0]], *PROMPTS[1:]]
    plain = tokens_of(make_rig(llama), prompts)
    rig = make_rig(llama, factories=[of_marked(failing)], ahead=ahead)
    found = tokens_of(rig, prompts)
    end = rig.results[0].end
    assert end is not None
    assert end.reason is EndReason.FAULT
    assert end.message == message.format(name=of_marked(failing).__name__)
    assert "secret" not in end.message
    assert found[0] == plain[0][:2]
    assert found[1:] == plain[1:]
    assert len(made) == 1
    assert made[0].calls <= 3, "after its failure it is not called again"


def test_one_that_cannot_be_made_ends_its_request_alone(llama: Path) -> None:
    def broken(prompt: NDArray[np.int32]) -> LogitsProcessor | None:
        if prompt[0] == MARKED:
            raise ValueError("no")
        prompt[:] = 0  # it has its own copy
        return None

    prompts = [[MARKED, *PROMPTS[0]], *PROMPTS[1:]]
    plain, rig = tokens_of(make_rig(llama), prompts), make_rig(llama, factories=[broken])
    assert tokens_of(rig, prompts)[1:] == plain[1:]
    end = rig.results[0].end
    assert end is not None
    assert end.message.endswith("broken raised ValueError")


def test_beam_search_is_refused_beside_them(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match="width is 3: does not go with the server's logits processors"):
        make_request(make_rig(llama, factories=[NoRepeats]), PROMPTS[0], beam=Beam(3))


def plugin(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with entry points."""
    info = directory / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.logits_processors]\nfirst = plugin_of_a_test:make\nsecond = plugin_of_a_test:other\n"
        "number = plugin_of_a_test:NUMBER\nmissing = plugin_of_a_test:nothing\n"
    )
    (directory / "plugin_of_a_test.py").write_text("def make(prompt): ...\ndef other(prompt): ...\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(directory)


def test_entry_points_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, monkeypatch)
    assert [(one.name, one.make.__name__) for one in load_factories("second, first")] == [
        ("second", "other"), ("first", "make"),
    ]  # fmt: skip
    assert load_factories(None) == load_factories("") == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("first,third", "'third' is no entry point of quire.logits_processors; known: first, missing, number, second"),
        ("number", "'number' is a int, must be callable"),
        ("missing", "'missing' cannot be imported: "),
    ],
)
def test_entry_points_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, message: str
) -> None:
    plugin(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="--logits-processors: ") as raised:
        load_factories(names)
    assert message in str(raised.value)
