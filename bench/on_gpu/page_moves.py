"""The section on moves of KV pages: within the pool, and between it and the host tier."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bench.on_gpu.attention_speed import DIM, HEADS, KV_HEADS, PAGE
from bench.on_gpu.bench import Bench
from bench.on_gpu.memory import free
from bench.on_gpu.report import WRONG, Table
from bench.on_gpu.timing import HostTimer, Timing, Work, seconds_of
from cache_manager.layout import KVLayout
from model.gpu.attention_backend import TritonAttention
from model.host_copies import CudaCopies
from model.host_memory import HostMemory, PageLocking
from model.page_store import PageStore

A_TABLE = 4.0  # seconds
LOCKED, PAGEABLE = "page-locked", "pageable"
KVS = {"bfloat16": None, "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class MoveSizes:
    """Sizes of the section.

    Attributes:
        layers: Layers of a page.
        pages: Pages of a move.
        rounds: Rounds of each measurement.
    """

    layers: int = 32
    pages: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A pool whose first pages are filled, and as many more to move them to.

    Attributes:
        attention: The pool's back end.
        page_bytes: Bytes of a page in canonical form.
        first: [n] int32. Filled pages, in no order.
        others: [n] int32. Pages that are not.
        groups: [n] int32. Layer group of each.
    """

    attention: TritonAttention
    page_bytes: int
    first: np.ndarray
    others: np.ndarray
    groups: np.ndarray

    @staticmethod
    def of(device: torch.device, sizes: MoveSizes, kv: str | None) -> "Pages":
        layout = KVLayout.uniform((tuple(range(sizes.layers)),), KV_HEADS, DIM, 1 if kv else 2, PAGE, 4 if kv else 0)
        attention = TritonAttention(layout, 2 * sizes.pages, HEADS, kv or "bfloat16", device, "bfloat16")
        first, others = np.random.default_rng(0).permutation(2 * sizes.pages).astype(np.int32).reshape(2, -1)
        made = Pages(attention, layout.page_bytes, first, others, np.zeros(sizes.pages, np.int32))
        content = torch.randint(0, 256, (sizes.pages, layout.page_bytes), dtype=torch.uint8, device=device)
        attention.import_pages(made.first, made.groups, content)
        return made

    @property
    def bytes(self) -> int:
        """Bytes of a move."""
        return len(self.first) * self.page_bytes

    def content(self, pages: np.ndarray) -> Tensor:
        return self.attention.export(pages, self.groups)

    def unlike(self) -> int:
        """Returns how many pages are not as they were in their first places."""
        return int((self.content(self.first) != self.content(self.others)).any(1).sum())

    def forget(self) -> None:
        self.attention.poison(self.others)


def page_moves(bench: Bench, sizes: MoveSizes | None = None) -> None:
    sizes = MoveSizes() if sizes is None else sizes
    with torch.inference_mode():
        for name, kv in KVS.items():
            if not bench.budget.allows(A_TABLE):
                table = Table(f"moves of pages, KV in {name}", {"move": ""})
                table.skip(name, bench.budget.why_not(A_TABLE))
                bench.report.publish(table)
                continue
            pages = Pages.of(bench.device, sizes, kv)
            bench.report.publish(device_table(bench, sizes, pages, name), host_table(bench, sizes, pages, name))
            del pages
            free()


def device_table(bench: Bench, sizes: MoveSizes, pages: Pages, kv: str) -> Table:
    table = Table(f"moves of pages on the device, KV in {kv}", {
        "move": "", "MB": ",.0f", "ms": ".4f", "spread": ".0%", "GB/s": ",.0f", "of copy": ".0%", "verdict": "",
    })  # fmt: skip
    table.notes.append(f"{sizes.pages} pages of {PAGE} tokens in {sizes.layers} layers with {KV_HEADS} KV heads of "
                       f"{DIM}. GB/s: bytes read and written once, as a copy's.")  # fmt: skip
    form = pages.content(pages.first)
    pairs = np.stack((pages.first, pages.others), 1)
    moves: dict[str, Work] = {
        "copy": lambda: pages.attention.copy(pairs),
        "export": lambda: pages.content(pages.first),
        "import": lambda: pages.attention.import_pages(pages.others, pages.groups, form),
    }
    for name, move in moves.items():
        with table.attempt(name):
            pages.forget()
            timing = seconds_of(bench.timer, move, sizes.rounds)
            rate = 2 * pages.bytes / timing.median
            table.add(**{
                "move": name, "MB": pages.bytes / 1e6, "ms": 1e3 * timing.median, "spread": timing.spread,
                "GB/s": rate / 1e9, "of copy": rate / bench.ceilings.copy if bench.ceilings else None,
                "verdict": "" if name == "export" else verdict(pages.unlike()),
            })  # fmt: skip
    return table


def host_table(bench: Bench, sizes: MoveSizes, pages: Pages, kv: str) -> Table:
    table = Table(f"moves of pages to the host and back, KV in {kv}", {
        "move": "", "MB": ",.0f", "ms": ".3f", "spread": ".0%", "GB/s": ",.2f", "verdict": "",
    })  # fmt: skip
    table.notes.append(
        f"{sizes.pages} pages, by the host's clock. save, load: model.page_store.PageStore as the engine calls it, "
        "checksums included. checksums: by one thread. "
        "one copy: of as many bytes in one piece, which is the limit. GB/s: bytes of the pages."
    )
    ways = {PAGEABLE: None} | ({LOCKED: PageLocking.of_cuda()} if bench.device.type == "cuda" else {})
    for memory, locking in ways.items():
        with table.attempt(memory):
            copies = CudaCopies(bench.device) if bench.device.type == "cuda" else None
            store = PageStore(pages.attention, sizes.pages, pages.page_bytes, b"bench", locking, copies)
            if locking is not None and not store.content.is_pinned():
                raise RuntimeError("the memory is not page-locked")
            for name, move, check in store_moves(pages, store):
                pages.forget()
                timing = timed(bench, sizes, move)
                table.add(**row_of(f"{name}, {memory}", pages, timing), verdict=verdict(check()) if check else "")
            store.close()
        with table.attempt(f"one copy, {memory}"):
            whole = HostMemory(pages.bytes, locking)
            for name, move in one_copy(pages, whole.content):
                table.add(**row_of(f"{name}, {memory}", pages, timed(bench, sizes, move)))
            whole.close()
    return table


def store_moves(pages: Pages, store: PageStore) -> list[tuple[str, Work, Callable[[], int] | None]]:
    """Returns moves through a store: name, work, and a function that counts pages which are wrong afterwards."""
    slots = np.arange(len(pages.first), dtype=np.int32)
    saved = np.column_stack((pages.first, slots, pages.groups))
    loaded = np.column_stack((slots, pages.others, pages.groups))

    def save() -> None:
        store.save(saved)
        store.settle()

    return [
        ("save", save, None),
        ("load", lambda: store.load(loaded), pages.unlike),
        ("checksums", lambda: [xxhash.xxh3_64_intdigest(content.numpy().data) for content in store.content], None),
    ]


def one_copy(pages: Pages, host: Tensor) -> list[tuple[str, Work]]:
    device = pages.content(pages.first).flatten()
    return [("one copy to the host", lambda: host.copy_(device)), ("one copy back", lambda: device.copy_(host))]


def timed(bench: Bench, sizes: MoveSizes, move: Work) -> Timing:
    """Times a move until the device has done it."""

    def whole() -> None:
        move()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()

    return seconds_of(HostTimer(), whole, sizes.rounds)


def row_of(name: str, pages: Pages, timing: Timing) -> dict[str, Any]:
    return {
        "move": name, "MB": pages.bytes / 1e6, "ms": 1e3 * timing.median, "spread": timing.spread,
        "GB/s": pages.bytes / timing.median / 1e9,
    }  # fmt: skip


def verdict(wrong: int) -> str:
    return f"{WRONG}: {wrong} pages are others" if wrong else "right"
