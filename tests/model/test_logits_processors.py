"""Logits processors of a user's own: what they see, what they change; one that fails ends its request alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.sampling import logits_processors
from model.sampling.logits_processors import LogitsProcessor, LogitsProcessorFactory, load_factories
from scheduler.events import EndReason
from scheduler.request import Beam, InvalidRequest
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
    """Under preemption too: whoever goes on gets a new processor with the tokens so far."""
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
    class Only:
        def __init__(self, token: int) -> None:
            self.token = token

        def drew(self, token: int) -> None: ...

        def apply(self, logits: Tensor, position: int) -> Tensor:
            return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(self.token), 0.0)

    rig = make_rig(llama, factories=[lambda _: Only(3), lambda _: Only(9)])
    assert tokens_of(rig, PROMPTS[:1]) == [[9] * NEW]


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
    assert end.message == message.format(name=of_marked(failing).__qualname__)
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
    assert [made.__name__ for made in load_factories("second, first")] == ["other", "make"]
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
