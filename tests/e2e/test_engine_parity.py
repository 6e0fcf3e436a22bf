"""Laws of tests/model/test_parity.py, for engines in a thread, behind the link, and in a Ray actor.

Any schedule, in any place, gives the tokens that transformers gives, and logprobs with the same bits.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from model.config import read_config
from model.cpu.decoder import CompiledDecoder
from model.forward import ForwardBatch, ForwardOutput
from model.settings import ModelSettings
from rpc.engines import launchers
from rpc.hosts import choose_hosts
from rpc.link import codec
from rpc.settings import EngineSettings, ServerSettings
from scheduler.events import EndReason, EngineStats, StepOutputs, Submit
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.request import Request
from scheduler.resolve import resolve
from scheduler.spec import Spec
from tests.model.test_parity import ENDLESS, NEW, SCHEDULES, TOGETHER, Schedule, random_prompts
from tests.support.checkpoints import greedy_ids, write_llama
from tests.support.forking import ForkedForkServer

ENGINES = {
    "thread": EngineSettings(engine="thread"),
    "process": EngineSettings(engine="process"),
    "ray": EngineSettings(ray=True),
}
TOP = 20
PATIENCE = 120.0

PROMPTS = random_prompts(list(range(1, 91)))
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12},
    {"temperature": 1.3, "top_k": 20, "seed": 13},
    {"temperature": 1.0, "min_p": 0.02, "top_p": 0.95, "seed": 2**64 - 1},
    {"temperature": 2.0, "top_p": 0.8, "top_k": 50, "min_p": 0.01, "seed": 0},
    {
        "temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.25,
        "logit_bias": ((5, 3.0), (6, -2.5)), "allowed_token_ids": tuple(range(200)), "seed": 15,
    },
]  # fmt: skip
# Every seventh prompt stands a second time in the cast, sampled.
CAST = [(prompt, {"temperature": 0.0}) for prompt in PROMPTS] + [
    (prompt, SAMPLED[i % len(SAMPLED)]) for i, prompt in enumerate(PROMPTS[::7])
]

ALL, SOME, FEW = range(len(CAST)), range(0, len(CAST), 3), range(9)

Tokens = dict[tuple[int, int], tuple[int, bytes]]
"""By attempt and position: the token, and the bits of its logprob, its rank and the likeliest tokens' logprobs."""


@dataclass
class Record:
    """Results of an engine."""

    tokens: Tokens = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)
    next_position: dict[int, int] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)

    def take(self, outputs: StepOutputs) -> None:
        logprobs = outputs.logprobs
        for i, attempt in enumerate(outputs.attempts.tolist()):
            position = int(outputs.positions[i])
            assert attempt not in self.ends, "a token after the end"
            assert self.next_position.get(attempt, position) == position, "a gap or a duplicate"
            self.next_position[attempt] = position + 1
            arrays = (logprobs.chosen[i], logprobs.rank[i], logprobs.top_ids[i], logprobs.top[i])
            assert [array.dtype for array in arrays] == ["<f4", "<i4", "<i4", "<f4"]
            assert logprobs.top.shape[1] == TOP
            self.tokens[attempt, position] = int(outputs.tokens[i]), b"".join(array.tobytes() for array in arrays)
        for end in outputs.ends:
            assert end.reason is EndReason.LENGTH, end
            assert end.attempt not in self.ends, "two ends"
            self.ends.add(end.attempt)
        self.stats = outputs.stats


def settings_of(mode: str, directory: Path, schedule: Schedule) -> ServerSettings:
    config = read_config(directory)
    layout = config.kv_layout(schedule.page_size, config.dtype)
    memory = layout.pages_for(schedule.pool_tokens) * layout.page_bytes
    model = ModelSettings(str(directory), None, "auto", "cpu", schedule.page_size, memory, schedule.poison)
    return ServerSettings(model=model, engine=ENGINES[mode], scheduler=schedule.scheduling, queue=ENDLESS)


def request_of(member: int, limits: Limits) -> Request:
    prompt, sampling = CAST[member]
    spec = Spec(
        tuple(prompt),
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        stopping=Stopping(max_tokens=NEW, ignore_eos=True),
        output=Output(logprobs=True, top_logprobs=TOP),
    )
    return resolve(spec, prompt, limits, ModelDefaults(), minted_seed=0)


async def play(
    mode: str, directory: Path, schedule: Schedule, members: Iterable[int], emitted: Mapping[int, tuple[int, ...]]
) -> Tokens:
    """Members of the cast, all at once, on an engine such as `quire serve` would start; attempt i is member i.

    emitted: what an earlier attempt gave. Every attempt must end properly, every page be free at the end.
    """
    order = sorted(members, reverse=schedule.reverse)
    (host,) = choose_hosts(settings_of(mode, directory, schedule), bytes(32))
    loop = asyncio.get_running_loop()
    outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()
    record = Record()
    try:
        async with asyncio.timeout(PATIENCE):
            engine = await host.launch(lambda step: loop.call_soon_threadsafe(outputs.put_nowait, step))
            limits = engine.info.limits
            engine.send([Submit(i, request_of(i, limits), (emitted.get(i, ()),)) for i in order])
            while record.ends != set(order) or record.stats.pages_used:
                record.take(await outputs.get())
    finally:
        await host.stop()
    assert record.stats.preemptions >= min(1, schedule.preempts)
    return record.tokens


def played(
    mode: str,
    directory: Path,
    schedule: Schedule,
    members: Iterable[int] = ALL,
    emitted: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> Tokens:
    return asyncio.run(play(mode, directory, schedule, members, emitted))


@pytest.fixture(autouse=True)
def _fork_servers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "ForkServer", ForkedForkServer)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Tokens:
    """The whole cast together, on a thread of this process."""
    return played("thread", tiny, TOGETHER)


def outputs_of(tokens: Tokens, count: int) -> list[list[int]]:
    return [[tokens[i, position][0] for position in range(NEW)] for i in range(count)]


def test_tokens_are_those_of_transformers(tiny: Path, reference: Tokens) -> None:
    assert reference.keys() == {(i, position) for i in range(len(CAST)) for position in range(NEW)}
    assert outputs_of(reference, len(PROMPTS)) == greedy_ids(tiny, PROMPTS, NEW)


def differences(tokens: Tokens, reference: Tokens, members: Iterable[int] = ALL) -> list[tuple[int, int]]:
    """Returns the differences between two records, of these members of the cast."""
    keys = {(i, position) for i in members for position in range(NEW)}
    assert tokens.keys() <= keys
    return sorted(key for key in keys if tokens.get(key) != reference.get(key))


BY_NAME = {schedule.name: schedule for schedule in [TOGETHER, *SCHEDULES]}
HARDEST = BY_NAME["preempted, chunks, two in flight"]
# Schedules change what an engine computes, the place how it is told: tests/model/test_parity.py has all schedules.
PLACES = [
    ("thread", HARDEST.name),
    ("process", HARDEST.name),
    ("ray", "together"),
    *(
        pytest.param("process", name, marks=pytest.mark.slow)
        for name in (
            "together",
            "pages of 1",
            "two steps in flight",
            "reversed",
            "pages of 7",
            "chunks of 8",
            "few rows, small budget",
            "preempted, pages of 16",
        )
    ),
]


@pytest.mark.parametrize(("mode", "name"), PLACES)
def test_no_place_and_no_schedule_changes_a_bit(tiny: Path, reference: Tokens, mode: str, name: str) -> None:
    schedule = BY_NAME[name]
    members = SOME if schedule.preempts else ALL  # the fewer run at once, the longer it takes
    assert differences(played(mode, tiny, schedule, members), reference, members) == []


@pytest.mark.parametrize("mode", ["thread", "process", pytest.param("ray", marks=pytest.mark.slow)])
def test_resubmitted_requests_go_on_with_the_same_bits(tiny: Path, reference: Tokens, mode: str) -> None:
    """With any number of tokens that an earlier attempt emitted, from none to all; in a pool that is too small."""
    known = {i: 7 * i % (NEW + 1) for i in SOME}
    assert set(known.values()) == set(range(NEW + 1))
    emitted = {i: tuple(reference[i, position][0] for position in range(known[i])) for i in SOME}
    rest = {(i, position): value for (i, position), value in reference.items() if position >= known.get(i, 0)}
    assert differences(played(mode, tiny, HARDEST, SOME, emitted), rest, SOME) == []


# Planted faults: the comparison finds them.


def test_one_bit_changed_on_the_link_would_show(tiny: Path, reference: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = codec.decode_outputs

    def leaky(message):  # type: ignore[no-untyped-def]
        outputs = decode(message)
        hit = (outputs.attempts == 5) & (outputs.positions == 3)
        chosen = np.where(hit, np.nextafter(outputs.logprobs.chosen, np.float32(0)), outputs.logprobs.chosen)
        return replace(outputs, logprobs=replace(outputs.logprobs, chosen=chosen))

    monkeypatch.setattr(codec, "decode_outputs", leaky)
    assert differences(played("process", tiny, TOGETHER, FEW), reference, FEW) == [(5, 3)]


def test_bits_that_depend_on_the_batch_would_show(
    tiny: Path, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = CompiledDecoder.forward

    def leaky(self: CompiledDecoder, batch: ForwardBatch) -> ForwardOutput:
        return ForwardOutput(forward(self, batch).logits * (1 + 1e-6 * len(batch.tokens)))

    monkeypatch.setattr(CompiledDecoder, "forward", leaky)
    assert differences(played("thread", tiny, TOGETHER, FEW), reference, FEW) != []
