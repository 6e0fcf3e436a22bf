"""Ranks on one device: NCCL for a rank alone, and two ranks whose tensors on the device gloo exchanges."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.gpu.attention_backend import TritonAttention
from model.gpu.graphs import CudaRecorder, Recorder
from model.gpu.parts import add_by_kernel
from model.parallel.distributed import Distributed, find_store, offer_store
from model.parallel.shard import Shard
from model.parallel.sums import add_in_order
from tests.model.gpu.device.engine import EXACT, NEAR, PROMPTS, Oracle, on_device, run
from tests.model.gpu.device.place import DEVICE, REHEARSED, needs_cuda
from tests.support.engines import GROUPS
from tests.support.interpreted import ROOT

HOST = "127.0.0.1"
NEARNESS = {"float32": EXACT, "bfloat16": NEAR}


@pytest.fixture
def alone() -> Distributed:
    store, _ = offer_store(HOST, 1)
    return Distributed("gloo" if REHEARSED else "nccl", Shard(0, 1), store, HOST, 60.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (128, 256)])
def test_a_rank_alone_gets_its_own_part_back(alone: Distributed, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
    with torch.inference_mode():
        assert torch.equal(alone.all_gather(x), x[None])
        assert torch.equal(alone.sum(x), x)
        assert torch.equal(alone.gather(x, [shape[1]]), x)
        alone.started()
        assert torch.equal(alone.sum(x), x), "after the first step the timeout is another"
    alone.close()


def test_exchanges_are_recorded_and_replayed(alone: Distributed) -> None:
    """A graph with exchanges reads what is in its places when it is replayed; a sum in two exchanges is one too."""
    recorder: Recorder = (lambda work: work) if REHEARSED else CudaRecorder()
    x = torch.ones((4, 1024), dtype=torch.bfloat16, device=DEVICE)
    summed, moved = torch.zeros_like(x), torch.zeros_like(x)

    def work() -> None:
        summed.copy_(alone.sum(x, add_by_kernel if not REHEARSED else add_in_order))
        moved.copy_(alone.all_to_all(x.view(1, -1)).view_as(x))

    with torch.inference_mode():
        alone.gather(x, [x.shape[1]])  # the first exchange connects the ranks, which cannot be recorded
        replay = recorder(work)
        for value in (3.0, -7.0):
            x.fill_(value)
            replay()
            assert torch.equal(summed, x)
            assert torch.equal(moved, x)
    alone.close()


WAITS = """
import torch
from model.parallel.distributed import Distributed, offer_store
from model.parallel.shard import Shard

store, _ = offer_store("127.0.0.1", 1)
alone = Distributed("nccl", Shard(0, 1), store, "127.0.0.1", 1.0)
x = torch.ones(4, 4, device="cuda")
alone.gather(x, [4])
alone.started()  # from now on the timeout is one second
torch.cuda.synchronize()
print("started", flush=True)
torch.cuda._sleep(50_000_000_000)  # half a minute, in which the exchange waits for the device
alone.all_gather(x)
torch.cuda.synchronize()
print("survived", flush=True)
"""


@needs_cuda
def test_the_watchdog_ends_a_process_whose_exchange_takes_too_long() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert "started" in done.stdout, done.stderr[-3000:]
    assert "survived" not in done.stdout, "an exchange of half a minute passed a timeout of a second"
    assert done.returncode == -signal.SIGABRT, (done.returncode, done.stderr[-3000:])
    assert "timeout" in done.stderr.lower(), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("model", "quantization", "dtype"),
    [
        ("dense", None, "bfloat16"),
        ("dense", None, "float32"),
        ("dense", "int4", "bfloat16"),
        ("mixture", None, "float32"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(
    model: str, quantization: str | None, dtype: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(model)
    rig = on_device(directory, dtype=dtype, quantization=quantization, ranks=2, apart=True)
    found = run(rig, PROMPTS)
    follower = GROUPS[-1].computers[1]
    assert follower.device.type == DEVICE
    assert REHEARSED or isinstance(follower.attention, TritonAttention)
    # Scales of groups depend on the degree: the numbers in int4 are those of two ranks.
    ranks = 1 if quantization is None else 2
    oracle = Oracle.of(directory, quantization=quantization, ranks=ranks, apart=ranks > 1)
    oracle.check(PROMPTS, found, NEARNESS[dtype])


def test_a_sum_of_two_ranks_on_the_device_is_in_their_order() -> None:
    """As on a CPU: in float32, in the order of ranks, whatever the shape."""
    own, port = offer_store(HOST, 2)
    stores = [own, find_store(HOST, port, 2)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: Distributed("gloo", Shard(rank, 2), stores[rank], HOST, 30.0), range(2)))
        for rows, width in ((1, 8), (5, 300), (64, 256)):
            generator = torch.Generator().manual_seed(rows)
            parts = (torch.randn(2, rows, width, generator=generator) * 30).bfloat16().to(DEVICE)

            def add(rank: int, parts: Tensor = parts) -> Tensor:
                with torch.inference_mode():
                    return made[rank].sum(parts[rank])

            expected = (parts[0].float() + parts[1].float()).bfloat16()
            for total in pool.map(add, range(2)):
                assert torch.equal(total, expected)
    for one in made:
        one.close()
