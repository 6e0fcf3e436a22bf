"""Law: any schedule gives the tokens that transformers gives, and logits with the same bits."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.cpu.decoder import CompiledDecoder
from model.forward import ForwardBatch, ForwardOutput
from model.inputs.tokenizer_files import load_tokenizer
from scheduler.events import Abort, EndReason, Event, Submit
from scheduler.settings import QueueLimits, SchedulerSettings
from tests.support.checkpoints import greedy_ids, write_llama
from tests.support.engines import Rig, make_request, make_rig
from tests.support.examples import examples

pytestmark = pytest.mark.sample(3)

NEW = 24
ENDLESS = QueueLimits(requests=1000, pools_of_tokens=1e9, wait=1e9)  # the queue refuses no request


def random_prompts(lengths: list[int], vocabulary: int = 320, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocabulary, n).tolist() for n in lengths]


@dataclass(frozen=True)
class Schedule:
    """A way to run a set of requests. preempts: the least number of preemptions that make it what its name says.
    ahead: each step is launched before it is known what the one before has drawn.
    """

    name: str
    page_size: int = 16
    pool_tokens: int = 4096
    scheduling: SchedulerSettings = field(default_factory=lambda: SchedulerSettings(max_sequences=128))
    reverse: bool = False
    poison: bool = True
    preempts: int = 0
    ahead: bool = False

    def run(self, directory: Path, prompts: list[list[int]], new_tokens: int, dtype: str = "float32") -> Rig:
        """Attempt i is prompt i. Everything that can be said of every schedule is checked here."""
        rig = make_rig(
            directory, self.page_size, self.pool_tokens, self.scheduling, True, self.poison, dtype, queue=ENDLESS,
            ahead=self.ahead,
        )  # fmt: skip
        order = list(range(len(prompts)))
        if self.reverse:
            order.reverse()
        results = rig.run({i: make_request(rig, prompts[i], new_tokens) for i in order})
        assert all(results[i].end is not None and results[i].end.reason is EndReason.LENGTH for i in order)
        assert rig.preemptions >= self.preempts
        return rig


def tokens_of(rig: Rig, count: int) -> list[list[int]]:
    return [rig.results[i].tokens for i in range(count)]


def bits_of(rig: Rig, count: int) -> list[dict[int, bytes]]:
    return [rig.logits_of(i) for i in range(count)]


TOGETHER = Schedule("together")
CHUNKED = SchedulerSettings(max_sequences=128, prefill_chunk=8)
PIPELINED = SchedulerSettings(max_sequences=128, steps_in_flight=2)
BOTH = SchedulerSettings(max_sequences=128, prefill_chunk=8, steps_in_flight=2)
TIGHT = SchedulerSettings(max_sequences=7, max_batched_tokens=11, prefill_chunk=5, steps_in_flight=2)

TIGHT_POOL = Schedule("few rows, small budget", pool_tokens=64, scheduling=TIGHT)

SCHEDULES = [
    Schedule("reversed", reverse=True),
    Schedule("unpoisoned", poison=False),
    Schedule("pages of 1", page_size=1),
    Schedule("pages of 7", page_size=7),
    Schedule("chunks of 8", scheduling=CHUNKED),
    Schedule("two steps in flight", scheduling=PIPELINED),
    Schedule("few rows, small budget", scheduling=TIGHT),
    Schedule("preempted, pages of 1", page_size=1, pool_tokens=128, preempts=20),
    Schedule("preempted, pages of 7", page_size=7, pool_tokens=301, preempts=10),
    Schedule("preempted, pages of 16", pool_tokens=256, preempts=4),
    Schedule("preempted, chunks, two in flight", page_size=1, pool_tokens=130, scheduling=BOTH, preempts=20),
    Schedule("preempted, reversed, two in flight", pool_tokens=320, scheduling=BOTH, reverse=True, preempts=4),
    Schedule("launched ahead", scheduling=BOTH, ahead=True),
    Schedule("launched ahead, preempted", page_size=1, pool_tokens=130, scheduling=BOTH, preempts=20, ahead=True),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(list(range(1, 91)))


@pytest.fixture(scope="module")
def together(tiny: Path, prompts: list[list[int]]) -> Rig:
    return TOGETHER.run(tiny, prompts, NEW)


def test_tokens_are_those_of_transformers(tiny: Path, prompts: list[list[int]], together: Rig) -> None:
    assert tokens_of(together, len(prompts)) == greedy_ids(tiny, prompts, NEW)


SLOW = {
    "preempted, pages of 1", "preempted, pages of 7", "preempted, reversed, two in flight",
    "preempted, chunks, two in flight",
}  # fmt: skip
"""What they combine, other schedules have one by one, and the drawn ones together."""


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(one, marks=[pytest.mark.slow] if one.name in SLOW else []) for one in SCHEDULES],
    ids=lambda schedule: schedule.name,
)
def test_no_schedule_changes_a_bit(tiny: Path, prompts: list[list[int]], together: Rig, schedule: Schedule) -> None:
    rig = schedule.run(tiny, prompts, NEW)
    assert tokens_of(rig, len(prompts)) == tokens_of(together, len(prompts))
    assert bits_of(rig, len(prompts)) == bits_of(together, len(prompts))


def test_alone_is_as_in_a_batch(tiny: Path, prompts: list[list[int]], together: Rig) -> None:
    rig = make_rig(tiny, record_logits=True)
    for i, prompt in enumerate(prompts):
        rig.run({i: make_request(rig, prompt, NEW)})
    assert tokens_of(rig, len(prompts)) == tokens_of(together, len(prompts))
    assert bits_of(rig, len(prompts)) == bits_of(together, len(prompts))


@pytest.mark.usefixtures("two_threads")
def test_two_threads_change_no_bit(tiny: Path, prompts: list[list[int]], together: Rig) -> None:
    rig = TIGHT_POOL.run(tiny, prompts[:9], NEW)
    assert bits_of(rig, 9) == bits_of(together, 9)


def test_every_drawn_token_has_recorded_logits(prompts: list[list[int]], together: Rig) -> None:
    """The comparisons above would be empty if the rig recorded nothing."""
    assert together.logits.keys() == {(i, position) for i in range(len(prompts)) for position in range(NEW)}
    for (i, position), logits in together.logits.items():
        assert int(logits.argmax()) == together.results[i].tokens[position]


def test_one_bit_would_show(
    tiny: Path, prompts: list[list[int]], together: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: logits whose last bits depend on how many rows stand beside a row."""
    forward = CompiledDecoder.forward

    def leaky(self: CompiledDecoder, batch: ForwardBatch) -> ForwardOutput:
        return ForwardOutput(forward(self, batch).logits * (1 + 1e-6 * len(batch.tokens)))

    monkeypatch.setattr(CompiledDecoder, "forward", leaky)
    rig = make_rig(tiny, record_logits=True)
    rig.run({5: make_request(rig, prompts[5], NEW)})
    assert rig.logits_of(5) != together.logits_of(5)


SHAPES = {
    "MHA": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "GQA of 3": {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "32 heads over one": {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8},
    "head_dim 24": {"hidden_size": 96, "head_dim": 24},
    "head_dim 6": {"head_dim": 6},
    "head_dim is not hidden / heads": {"hidden_size": 40, "head_dim": 16},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 331},
    "odd widths": {"intermediate_size": 100, "hidden_size": 60, "head_dim": 10, "vocab_size": 257},
    "one layer": {"num_hidden_layers": 1},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "norm epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sample(3)
def test_other_shapes(tmp_path: Path, shape: str) -> None:
    directory = write_llama(tmp_path, seed=3, **SHAPES[shape])
    prompts = random_prompts([1, 2, 7, 16, 17, 40], vocabulary=257)
    together = TOGETHER.run(directory, prompts, 16)
    assert tokens_of(together, len(prompts)) == greedy_ids(directory, prompts, 16)
    harsh = SchedulerSettings(max_sequences=4, max_batched_tokens=16, prefill_chunk=5, steps_in_flight=2)
    rig = Schedule("harsh", 7, 70, harsh, preempts=1).run(directory, prompts, 16)
    assert tokens_of(rig, len(prompts)) == tokens_of(together, len(prompts))
    assert bits_of(rig, len(prompts)) == bits_of(together, len(prompts))


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path, tiny: Path) -> None:
    directory = write_llama(tmp_path, shards=True)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    prompts = random_prompts([1, 20])
    one, many = (TOGETHER.run(d, prompts, 8) for d in (tiny, directory))
    assert bits_of(many, 2) == bits_of(one, 2)


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Around the edges of attention blocks (128 keys) and tiles."""
    return random_prompts([5, 100, 127, 128, 129, 200, 255, 256, 257, 300], seed=2)


def test_sequences_of_several_attention_blocks(long: Path, long_prompts: list[list[int]]) -> None:
    together = TOGETHER.run(long, long_prompts, NEW)
    assert tokens_of(together, len(long_prompts)) == greedy_ids(long, long_prompts, NEW)
    chunks = SchedulerSettings(max_sequences=128, prefill_chunk=37, steps_in_flight=2)
    rig = Schedule("chunks", 7, scheduling=chunks).run(long, long_prompts, NEW)
    assert tokens_of(rig, len(long_prompts)) == tokens_of(together, len(long_prompts))
    assert bits_of(rig, len(long_prompts)) == bits_of(together, len(long_prompts))


def test_long_sequences_that_are_preempted(long: Path) -> None:
    """Two fit while they are prompts; what they generate does not."""
    prompts = random_prompts([130, 131, 132, 133], seed=4)
    together = TOGETHER.run(long, prompts, NEW)
    for page_size in (1, 7):
        rig = Schedule("preempted", page_size, pool_tokens=287, scheduling=BOTH, preempts=2).run(long, prompts, NEW)
        assert tokens_of(rig, 4) == tokens_of(together, 4)
        assert bits_of(rig, 4) == bits_of(together, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_the_same_bits_under_any_schedule(
    long: Path, long_prompts: list[list[int]], dtype: str
) -> None:
    short = random_prompts(list(range(1, 40)))
    prompts = short + long_prompts
    together = TOGETHER.run(long, prompts, 12, dtype)
    for schedule, count in (
        (Schedule("reversed", reverse=True), len(prompts)),
        (Schedule("chunks", 7, scheduling=CHUNKED), len(prompts)),
        (Schedule("few rows", 16, scheduling=TIGHT), len(prompts)),
        (Schedule("preempted", 1, pool_tokens=128, scheduling=BOTH, preempts=5), len(short)),
    ):
        rig = schedule.run(long, prompts[:count], 12, dtype)
        assert tokens_of(rig, count) == tokens_of(together, count)
        assert bits_of(rig, count) == bits_of(together, count)
    rig = make_rig(long, record_logits=True, dtype=dtype)
    for i in (0, 3, len(prompts) - 1):
        rig.run({i: make_request(rig, prompts[i], 12)})
        assert rig.logits_of(i) == together.logits_of(i)


def test_demo_checkpoint(demo: Path) -> None:
    tokenizer = load_tokenizer(demo)
    texts = ["ROMEO:", "First Citizen:\nBefore we proceed any further, hear me", "\n", "O, she doth teach " * 12]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    together = TOGETHER.run(demo, prompts, 32)
    assert tokens_of(together, len(prompts)) == greedy_ids(demo, prompts, 32)
    rig = Schedule("chunks", 7, scheduling=BOTH).run(demo, prompts, 32)
    assert bits_of(rig, len(prompts)) == bits_of(together, len(prompts))


# Schedules drawn by hypothesis. What each request gives alone is computed once; hypothesis draws who runs beside whom.

CAST = [
    (1, 24, {}),
    (2, 22, {"temperature": 1.0, "seed": 11}),
    (5, 1, {}),
    (9, 24, {"temperature": 0.7, "top_p": 0.9, "seed": 12}),
    (3, 24, {"repetition_penalty": 1.4, "presence_penalty": 0.5}),
    (17, 15, {"temperature": 1.3, "top_k": 20, "seed": 13}),
    (6, 24, {}),
    (23, 2, {"temperature": 1.0, "min_p": 0.02, "top_p": 0.95, "seed": 2**64 - 1}),
    (8, 20, {"temperature": 0.9, "seed": 14, "frequency_penalty": 0.8, "logit_bias": ((7, 4.0), (9, -3.0))}),
    (130, 6, {}),  # two attention blocks; makes the pool large
]


@dataclass(frozen=True)
class Drawn:
    """events: (attempt, turn of its Submit, tokens that an earlier attempt emitted, turn of its Finish or None)."""

    events: list[tuple[int, int, int, int | None]]
    page_size: int
    spare: int
    scheduling: SchedulerSettings
    ahead: bool


@st.composite
def drawn_schedules(draw: st.DrawFn) -> Drawn:
    """Half of them crowd a small pool, so that sequences are preempted; the others vary everything."""
    crowded = draw(st.booleans())
    last = len(CAST) - (2 if crowded else 1)
    who = draw(st.lists(st.integers(0, last), min_size=5 if crowded else 1, max_size=7, unique=True))
    start = st.sampled_from([0, 0, 1] if crowded else [0, 1, 2, 9])
    known = st.sampled_from([0.0] if crowded else [0.0, 0.5, 1.0])
    finish = st.sampled_from([None, None, None, 7] if crowded else [None, None, 1, 2, 5, 12, 30])
    events = [(i, draw(start), int(draw(known) * (CAST[i][1] - 1)), draw(finish)) for i in who]
    rows = 6 if crowded else draw(st.integers(1, 6))
    return Drawn(
        events,
        page_size=draw(st.sampled_from([1, 2, 7, 16])),
        spare=draw(st.sampled_from([0, 4, 15] if crowded else [0, 40, 1000])),
        scheduling=SchedulerSettings(
            max_batched_tokens=rows + draw(st.sampled_from([0, 1, 13, 300])),
            max_sequences=rows,
            prefill_chunk=draw(st.sampled_from([None, 1, 3, 16, 50])),
            steps_in_flight=draw(st.integers(1, 2)),
        ),
        ahead=draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Rig:
    rig = make_rig(tiny, record_logits=True)
    for i, (length, new_tokens, sampling) in enumerate(CAST):
        rig.run({i: make_request(rig, random_prompts([length], seed=i)[0], new_tokens, **sampling)})
    return rig


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=drawn_schedules())
def test_tokens_and_logits_do_not_depend_on_the_schedule(tiny: Path, alone: Rig, schedule: Drawn) -> None:
    longest = max(sum(CAST[i][:2]) for i, *_ in schedule.events)
    pool = -(-longest // schedule.page_size) * schedule.page_size + schedule.spare
    rig = make_rig(
        tiny, schedule.page_size, pool, schedule.scheduling, record_logits=True, queue=ENDLESS, ahead=schedule.ahead
    )
    script: dict[int, list[Event]] = {}
    for i, start, known, end in schedule.events:
        length, new_tokens, sampling = CAST[i]
        request = make_request(rig, random_prompts([length], seed=i)[0], new_tokens, **sampling)
        script.setdefault(start, []).append(Submit(i, request, (tuple(alone.results[i].tokens[:known]),)))
        if end is not None:
            script.setdefault(start + end, []).append(Abort(i))
    rig.play(script)
    for i, _, known, end in schedule.events:
        expected, result = alone.results[i].tokens, rig.results[i]
        assert result.end is not None
        if result.end.reason is EndReason.LENGTH:
            assert result.tokens == expected
            assert rig.logits_of(i) == {p: b for p, b in alone.logits_of(i).items() if p >= known}
        else:
            assert (end is not None, result.end.reason) == (True, EndReason.FINISHED)
            assert result.tokens == expected[: len(result.tokens)]
            assert rig.logits_of(i).items() <= alone.logits_of(i).items()
