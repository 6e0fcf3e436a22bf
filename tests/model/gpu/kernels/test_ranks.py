"""Models divided among ranks that run on the kernels, beside ranks on the reference and beside one device.

Ranks are threads of this process, connected by gloo, which stands for NCCL.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import loading
from model.attention.backend import StepShape
from model.backend import Backend, StepSizes
from model.config import ModelConfig
from model.errors import RankLost
from model.forward import ForwardBatch
from model.gpu import attention_backend
from model.gpu import backend as gpu_backend
from model.gpu.attention_backend import TritonAttention
from model.gpu.backend import open_gpu_backend
from model.gpu.graphs import Work
from model.gpu.mixtures import mixtures_of
from model.gpu.parts import KernelSummed, add_by_kernel
from model.loading import LoadedModel, load
from model.memory import MemoryFound
from model.parallel import follow, lead
from model.parallel.collective import Collective, Ranks, Summed
from model.parallel.distributed import Distributed
from model.parallel.shard import Shard
from model.parallel.steps import Step, StepInputs, pack_step, receive_inputs
from model.parallel.sums import add_in_order
from model.settings import ModelSettings
from scheduler.settings import RequestLimits, SchedulerSettings
from tests.model.families import checkpoints
from tests.model.families.cases import BY_NAME
from tests.model.gpu.kernels.device import DEVICE, INTERPRETED
from tests.model.gpu.kernels.test_model import SMALL
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.checkpoints import write_llama, write_ministral
from tests.support.engines import GROUPS, Rig, make_request, make_rig
from tests.support.ranks import ThreadGroup

NEW = 3
NEAR = 1e-4
"""Between degrees, as in tests/model/parallel/test_parity.py."""

MIXTURES = ("deepseek-v2", "qwen3-moe", "gpt-oss", "minimax-m2", "granite-hybrid")
in_threads = pytest.mark.skipif(not INTERPRETED, reason="ranks need a GPU each")
choose_backend = loading.choose_backend


def choose(
    config: ModelConfig, settings: ModelSettings, dtype: str, kv_dtype: str, device: str, ranks: Ranks
) -> Backend:
    """`choose_backend` that opens the GPU's on a CPU."""
    if settings.backend == "triton":
        return open_gpu_backend(config, settings, dtype, kv_dtype, device, ranks)
    return choose_backend(config, settings, dtype, kv_dtype, device, ranks)


class NoMemory:
    """A device's memory that is not measured: there is none."""

    def peak_of(self, work: Callable[[], object]) -> int:
        return 0

    def lasting(self, work: Callable[[], object]) -> int:
        work()
        return 0


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the back end open where kernels run in the interpreter, one at a time.

    The interpreter changes Triton's own functions, and `ast` of CPython 3.11 fails in two threads at once.
    """
    from triton.runtime.interpreter import InterpretedFunction

    lock, run = threading.Lock(), InterpretedFunction.run

    def run_alone(*args: Any, **options: Any) -> None:
        with lock:
            run(*args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run_alone)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "the interpreter")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(attention_backend, "tuning_for", lambda *_: SMALL)
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)  # weights as a GPU has them
    monkeypatch.setattr(gpu_backend, "run_all_tiles", lambda *_: None)  # there is nothing to compile
    monkeypatch.setattr(gpu_backend, "CudaMemory", NoMemory)
    monkeypatch.setattr(loading, "choose_backend", choose)


def run(directory: Path, ranks: int, backend: str, quantization: str | None = None) -> Rig:
    """Prefills in chunks beside decodes; freed pages are filled with NaN."""
    scheduling = SchedulerSettings(max_sequences=2, max_batched_tokens=32, prefill_chunk=13)
    rig = make_rig(
        directory, 16, 400, scheduling, record_logits=True, poison=True, dtype="float32", queue=ENDLESS,
        backend=backend, quantization=quantization, ranks=ranks, apart=True,
    )  # fmt: skip
    prompts = random_prompts([20, 3], seed=6)
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    return rig


def near(found: Rig, expected: Rig, least: float) -> None:
    """The same tokens, and logits of which the first differ by 3e-5 or `least` at most."""
    assert {i: one.tokens for i, one in found.results.items()} == {i: one.tokens for i, one in expected.results.items()}
    assert found.logits.keys() == expected.logits.keys()
    for place, logits in expected.logits.items():
        allowed = max(least, 3e-5 * max(10.0, float(np.abs(logits).max())))
        np.testing.assert_allclose(found.logits[place], logits, atol=allowed, rtol=0)


def parts_of(part: Any) -> Iterator[Any]:
    """Yields a part of a model and all parts of it."""
    yield part
    if isinstance(part, list | tuple):
        inner: Any = part
    else:
        inner = [getattr(part, field.name) for field in fields(part)] if is_dataclass(part) else []
    for one in inner:
        yield from parts_of(one)


@in_threads
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kind", "ranks", "quantization"),
    [
        ("windows", 2, None),
        ("windows", 2, "int4"),
        ("llama", 4, None),
        ("gemma4", 2, None),
        ("deepseek-v2", 2, None),
        ("qwen3-moe", 2, None),
        ("qwen3-moe", 2, "int4"),
        ("gpt-oss", 2, None),
        ("minimax-m2", 2, None),
        ("qwen3.5", 2, None),
        ("granite-hybrid", 2, None),
        ("mamba2", 2, None),
    ],
)
def test_ranks_compute_what_the_reference_does(kind: str, ranks: int, quantization: str | None, tmp_path: Path) -> None:
    """With 4 ranks two have the same KV head. MiniMax M2 has a norm over the heads of all ranks, Mamba-2 one over the
    channels of several.
    """
    if kind == "windows":
        directory = write_ministral(tmp_path, 9, "fs")
    else:
        directory = checkpoints.write(BY_NAME[kind], tmp_path)
    found = run(directory, ranks, "triton", quantization)
    for computer in GROUPS[-1].computers.values():
        assert type(computer.attention) is TritonAttention
        sums = [part for part in parts_of(computer.model) if isinstance(part, Summed)]
        assert sums
        assert all(type(part) is KernelSummed for part in sums)
        assert any(mixtures_of(computer.model)) == (kind in MIXTURES)
    expected, one = (run(directory, degree, "reference", quantization) for degree in (ranks, 1))
    assert found.loaded.numerics != expected.loaded.numerics
    assert found.loaded.numerics.endswith(b" 1/%d" % ranks)
    near(found, expected, 0.0)
    if quantization is None:  # scales of groups depend on the degree
        near(found, one, NEAR)


REPLAYED: Counter[bool] = Counter()
"""Replays of graphs, by whether a follower made them."""


@pytest.fixture
def on_the_stream(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets gloo be taken for NCCL: steps are launched ahead, and are graphs, whose replays run everything anew."""

    def counted(work: Work) -> Work:
        return lambda: (REPLAYED.update([is_follower()]), work())

    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(Distributed, "runs_ahead", always, raising=False)
    monkeypatch.setattr(gpu_backend, "CudaRecorder", lambda: counted)
    REPLAYED.clear()


@in_threads
@pytest.mark.usefixtures("on_the_stream")
@pytest.mark.parametrize(
    ("kind", "ranks", "quantization"),
    [("windows", 2, None), ("windows", 2, "int4"), ("llama", 4, None), ("qwen3-moe", 2, None), ("qwen3.5", 2, None)],
)
def test_ranks_run_ahead_and_replay_the_same_graphs(
    kind: str, ranks: int, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched before the host has the tokens of the one before."""
    directory = write_ministral(tmp_path, 9, "fs") if kind == "windows" else checkpoints.write(BY_NAME[kind], tmp_path)
    packed = list[bool]()

    def pack(batch: ForwardBatch, shape: StepShape, page_size: int, inputs: bool) -> bytes:
        packed.append(inputs)
        return pack_step(batch, shape, page_size, inputs)

    monkeypatch.setattr(lead, "pack_step", pack)
    found = run(directory, ranks, "triton", quantization)
    assert found.loaded.runner.runs_ahead
    assert packed
    assert not any(packed), "the host has waited for the device"
    replays = [int(REPLAYED[follows]) for follows in (False, True)]
    assert replays[1] == (ranks - 1) * replays[0] >= NEW * (ranks - 1)
    near(found, run(directory, ranks, "reference", quantization), 0.0)
    if quantization is None:
        near(found, run(directory, 1, "reference"), NEAR)


@in_threads
@pytest.mark.usefixtures("on_the_stream")
def test_a_follower_with_other_inputs_is_found_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: followers embed the first token in the place of each."""
    expected = run(tiny, 1, "reference")
    near(run(tiny, 2, "triton"), expected, NEAR)

    def first(collective: Collective, step: Step, device: torch.device) -> StepInputs:
        given = receive_inputs(collective, step, device)
        return replace(given, tokens=given.tokens[:1].expand(len(given.tokens)))

    monkeypatch.setattr(follow, "receive_inputs", first)
    with pytest.raises(AssertionError):
        near(run(tiny, 2, "triton"), expected, NEAR)


@in_threads
@pytest.mark.usefixtures("interpreted")
def test_the_part_of_another_rank_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: both ranks have the columns of rank 0 in the products after attention and of MLPs."""
    directory = write_llama(tmp_path)
    expected = run(directory, 1, "reference")
    near(run(directory, 2, "triton"), expected, NEAR)
    for name in ("queries", "part"):
        method: Callable[[Shard, Any], slice] = getattr(Shard, name)
        with monkeypatch.context() as planted:
            planted.setattr(Shard, name, lambda own, of, right=method: right(Shard(0, own.size, own.grain), of))
            wrong = run(directory, 2, "triton")
        with pytest.raises(AssertionError):
            near(wrong, expected, NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_sum_by_a_kernel_has_the_bits_of_the_collectives(ranks: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts float32 off, where it should round")
    for shape in ((1, 1), (1, 48), (3, 1500), (70, 96)):
        generator = torch.Generator().manual_seed(ranks)
        parts = torch.randn(ranks, *shape, generator=generator) * 10.0 ** torch.arange(ranks).view(-1, 1, 1)
        given = (parts.clamp(-60_000, 60_000) / ranks).to(dtype).to(DEVICE)
        total = given[0].float()
        for part in given[1:]:
            total = total + part.float()
        assert torch.equal(add_by_kernel(given), total.to(dtype))
        assert torch.equal(add_in_order(given), total.to(dtype))


def is_follower() -> bool:
    return threading.current_thread() is not threading.main_thread()


class Measured:
    """Memory of a device that takes a mebibyte for each step, with or without the other ranks, and more for them."""

    now = threading.local()

    def peak_of(self, work: Callable[[], object]) -> int:
        self.now.measuring = True
        work()
        self.now.measuring = False
        return 2**20

    def lasting(self, work: Callable[[], object]) -> int:
        work()
        return BUFFERS


@pytest.fixture
def measured(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `Measured` in the place of a device's memory, with steps of 8 tokens."""
    monkeypatch.setattr(gpu_backend, "CudaMemory", Measured)
    monkeypatch.setattr(loading, "StepSizes", lambda rows, context, _: StepSizes(rows, context, 8))


def loading_two(directory: Path) -> tuple[ThreadGroup, Callable[[], LoadedModel]]:
    """Starts to load a model on two ranks. Returns them, and what loads rank 0's part."""
    settings = ModelSettings(str(directory), None, "float32", "cpu", backend="triton")
    group = ThreadGroup(directory, settings, 2, 8, apart=True)
    return group, lambda: load(directory, settings, 8, 512, RequestLimits(), group=group.led)


@in_threads
@pytest.mark.usefixtures("measured")
def test_all_ranks_have_the_pages_of_the_one_with_least_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures the same steps, and waits for no other meanwhile."""
    all_gather, working, sums = Distributed.all_gather, list[int](), list[tuple[int, ...]]()

    def exchanged(own: Distributed, x: Tensor) -> Tensor:
        sums.extend([] if working else [tuple(x.shape)])
        assert not getattr(Measured.now, "measuring", False), "a rank waits for others while it measures"
        return all_gather(own, x)

    def for_pool(_: MemoryFound, utilization: float, taken: int, sharing: int) -> int:
        working.append(taken)
        return (20 if is_follower() else 30) * PAGE_BYTES

    monkeypatch.setattr(Distributed, "all_gather", exchanged)
    monkeypatch.setattr(MemoryFound, "for_pool", for_pool)
    group, load_first = loading_two(tiny)
    GROUPS.append(group)
    first = load_first()
    assert first.layout.page_bytes == PAGE_BYTES
    assert first.pages == group.computers[1].pages == 20
    assert BUFFERS + 2**20 < working[0] == working[1] < BUFFERS + 2**23
    assert Counter(sums) == {(1, HIDDEN): 2, (8, HIDDEN): 2}, "a small sum and the largest, before memory is divided"


BUFFERS, HIDDEN = 2**30, 64
PAGE_BYTES = 3 * 2 * 16 * 16 * 4
"""3 layers, keys and values, 16 tokens, one head of 16 elements."""


@in_threads
@pytest.mark.usefixtures("measured")
def test_a_rank_without_memory_for_a_step_ends_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one does not wait for it in the step: it sees its end on their connection."""

    def peak_of(_: Measured, work: Callable[[], object]) -> int:
        if is_follower():
            raise torch.OutOfMemoryError("planted")
        return 0

    monkeypatch.setattr(Measured, "peak_of", peak_of)
    group, load_first = loading_two(tiny)
    with pytest.raises(RankLost, match="rank 1 has ended"):
        load_first()
    group.close()
    (error,) = group.failed
    assert "a step of 8 tokens and 8 sequences does not fit beside the weights on the GPU" in str(error)
