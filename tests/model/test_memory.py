"""Memory: what malloc keeps goes back, and the number of pages that a pool gets."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.layout import KVLayout
from model import memory
from model.backend import StepSizes
from model.loading import load_computer
from model.memory import MemoryFound, check_size, free_host_bytes, pool_pages, return_freed_memory
from model.parallel.collective import ONE_RANK
from model.reference.backend import TorchBackend
from model.settings import ALONE, ModelSettings

layouts = st.builds(
    lambda groups, layers, heads, dim, size, page: KVLayout.uniform(
        tuple(tuple(range(g * layers, (g + 1) * layers)) for g in range(groups)), heads, dim, size, page
    ),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 8), st.integers(1, 128), st.sampled_from([2, 4]),
    st.integers(1, 64),
)  # fmt: skip


@given(layout=layouts, memory=st.integers(0, 2**34), most=st.integers(1, 2**20))
def test_pages_fill_the_memory_but_no_more_than_is_of_use(layout: KVLayout, memory: int, most: int) -> None:
    if memory < layout.page_bytes * len(layout.groups):
        with pytest.raises(ValueError, match="--kv-cache-memory"):
            pool_pages(layout, memory, most)
        return
    pages = pool_pages(layout, memory, most)
    assert pages * layout.page_bytes <= memory
    assert layout.tokens_in(pages) >= min(most, layout.tokens_in(memory // layout.page_bytes))
    one_more = pages + 1
    assert one_more * layout.page_bytes > memory or one_more > layout.pages_for(most)


def test_an_example() -> None:
    """Llama 3 8B in bfloat16: 128 KiB a token, 2 MiB a page of 16."""
    layout = KVLayout.uniform((tuple(range(32)),), 8, 128, 2, 16)
    assert pool_pages(layout, 2**30, 10**6) == 512
    assert pool_pages(layout, 2**30 - 1, 10**6) == 511
    assert pool_pages(layout, 2**30, 100) == 7
    assert pool_pages(layout, layout.page_bytes, 10**6) == 1


def test_too_little_memory_says_how_much_a_page_takes() -> None:
    layout = KVLayout.uniform((tuple(range(32)),), 8, 128, 2, 16)
    with pytest.raises(ValueError, match=f"1000 bytes, one page of 16 tokens takes {2 * 2**20}"):
        pool_pages(layout, 1000, 100)


def test_host_memory_is_what_is_really_there() -> None:
    found = MemoryFound.of("cpu")
    assert found.total is None
    assert 2**20 < found.free < 2**50
    assert 2**20 < free_host_bytes() < 2**50
    assert found.for_pool(0.9, 10**15, 1) == found.free // 2, "steps take memory of the other half"


GIB = 2**30


def test_a_pool_gets_what_steps_leave_of_a_gpu() -> None:
    """A Llama 3 8B in bfloat16 on 24 GiB: 15 GiB of weights, half a GiB of the driver's."""
    total, own, steps = 24 * GIB, int(15.5 * GIB), int(1.9 * GIB)
    found = MemoryFound(total - own, total, own)
    pool = found.for_pool(0.9, steps, 1)
    assert pool == int(total * 0.9) - own - steps
    layout = KVLayout.uniform((tuple(range(32)),), 8, 128, 2, 16)
    assert layout.tokens_in(pool_pages(layout, pool, 10**9)) > 32_000
    assert pool + steps < found.free - 2 * GIB, "a tenth of the device stays free"


def test_engines_that_share_a_gpu_have_equal_parts() -> None:
    """Whichever of them comes first. Other programs have what they have."""
    total, own, steps = 80 * GIB, 16 * GIB, 2 * GIB
    first = MemoryFound(total - own, total, own).for_pool(0.9, steps, 2)
    assert first == 36 * GIB - own - steps
    later = MemoryFound(total - 2 * own - first - steps, total, own)
    assert later.for_pool(0.9, steps, 2) == first
    with pytest.raises(
        ValueError, match=r"0.9 of the GPU's 80.0 GiB among 2 engines is 36.0 GiB, .* 16.0 GiB of it, and"
    ):
        replace(later, free=5 * GIB).for_pool(0.9, steps, 2)
    assert later.for_pool(0.45, steps, 1) == first, "two servers, each told its part"


def test_a_gpu_without_room_for_kv_says_what_takes_it() -> None:
    found = MemoryFound(4 * GIB, 16 * GIB, 12 * GIB)
    with pytest.raises(ValueError, match=r"16.0 GiB is 14.4 GiB. The engine has 12.0 GiB, .* take 3.0 GiB: nothing"):
        found.for_pool(0.9, 3 * GIB, 1)


BLOCK, BLOCKS = 2**16, 2000  # bytes, so few that malloc takes them from its heap

keeps_freed_memory = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc's malloc keeps freed memory and returns it"
)


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def freed_between_blocks_that_stay() -> list[torch.Tensor]:
    """Frees seven of eight blocks. Returns the others, between which malloc keeps the memory of those."""
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
    return blocks[::8]


@keeps_freed_memory
def test_freed_memory_is_returned() -> None:
    stay = freed_between_blocks_that_stay()
    before = private_bytes()
    return_freed_memory()
    assert private_bytes() < before - BLOCK * BLOCKS // 2
    assert all(block.all() for block in stay)


@keeps_freed_memory
def test_loading_returns_freed_memory(tiny: Path) -> None:
    settings = ModelSettings(str(tiny), device="cpu", backend="reference", kv_cache_memory=2**20)
    load_computer(tiny, settings, 1, False, ALONE, ONE_RANK)  # imports
    stay = freed_between_blocks_that_stay()
    before = private_bytes()
    computer = load_computer(tiny, settings, 1, False, ALONE, ONE_RANK)
    assert private_bytes() < before - BLOCK * BLOCKS // 2
    assert computer.pages
    assert all(block.all() for block in stay)


@pytest.mark.parametrize("size", [None, 2**20])
def test_the_largest_step_is_run_whatever_sets_the_size_of_the_pool(
    size: int | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that compiles its kernels."""
    run = list[StepSizes]()
    monkeypatch.setattr(TorchBackend, "working_memory", lambda *given: run.append(given[-1]) or 0)
    settings = ModelSettings(str(tiny), device="cpu", backend="reference", kv_cache_memory=size)
    computer = load_computer(tiny, settings, 3, False, ALONE, ONE_RANK, 40)
    assert run == [StepSizes(3, computer.config.context, 40)]


def test_nothing_happens_with_another_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.memory.ctypes.CDLL", lambda _: object())
    return_freed_memory()


def test_a_size_is_not_compared_with_a_part_of_what_other_engines_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of 10 GiB on 32: the one that replaces the first finds 21 free, the other's pool is taken already."""
    monkeypatch.setattr(memory, "host_bytes", lambda: 32 * GIB)
    check_size("--f", 10 * GIB, 21 * GIB, 1, 2)
    with pytest.raises(ValueError, match="--f is 10737418240 bytes, only 9663676416 are free"):
        check_size("--f", 10 * GIB, 9 * GIB, 1, 2)
    with pytest.raises(ValueError, match="for each of 4 engines, and this machine has 34359738368"):
        check_size("--f", 10 * GIB, 30 * GIB, 1, 4)
    with pytest.raises(ValueError, match="only 2147483648 are free"):  # its ranks take theirs together
        check_size("--f", 6 * GIB, 8 * GIB, 4, 1)
    with pytest.raises(ValueError, match="for each of 2 ranks of 2 engines"):
        check_size("--f", 9 * GIB, 20 * GIB, 2, 2)
    check_size("--f", 60 * GIB, 70 * GIB, 1, 1)
