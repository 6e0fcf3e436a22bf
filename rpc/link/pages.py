"""KV pages on the link: the copies that an engine gives to others of the same model, and their checks.

An engine takes a copy for a page only under three conditions. It has computed the page's block hash itself. The tokens
that come with the copy are those of that hash. The bytes have the checksum that they came with, which also covers the
numerics.
"""

import zlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.block_hash import HASH_BYTES, BlockHash
from cache_manager.layout import MOST_TOKENS, KVLayout
from cache_manager.transfers import TransferredPage
from rpc.link.arrays import UINT8, LinkError, packed, unpacked
from scheduler.events import Submit


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """Copy of the pages of one index of a sequence.

    Attributes:
        tokens: Bytes that their block hash is made from, beside the hash before it.
        page: Their content.
    """

    tokens: bytes
    page: TransferredPage


@dataclass(frozen=True, slots=True)
class PageForm:
    """Form of the copies of one engine's pages.

    Attributes:
        needed: Of each page table, how many of the last pages of a sequence another engine needs; None for all.
        page_bytes: Bytes of a page of one table.
        page_size: Tokens of a page.
        numerics: See `EngineInfo`.
    """

    needed: tuple[int | None, ...]
    page_bytes: int
    page_size: int
    numerics: bytes

    @classmethod
    def of(cls, layout: KVLayout, numerics: bytes) -> "PageForm":
        seen = [None if group.window is None else layout.pages_before(group.window) for group in layout.groups]
        return cls((*seen, *[1] * layout.states.pages), layout.page_bytes, layout.page_size, numerics)

    def size(self, pages: int) -> int:
        """Returns the most bytes that copies of this number of consecutive pages of a sequence take."""
        return sum(pages if needed is None else min(pages, needed) for needed in self.needed) * self.page_bytes

    def most(self, size: int) -> int:
        """Returns of how many consecutive pages the copies take at most `size` bytes."""
        return bisect_right(range(MOST_TOKENS // self.page_size), size, key=self.size) - 1

    def checksum(self, page: pb.Page) -> int:
        return zlib.crc32(page.content, zlib.crc32(page.tables, zlib.crc32(self.numerics)))

    def encode(self, copy: PageCopy) -> pb.Page:
        tables, content = copy.page.tables.astype(np.uint8).tobytes(), packed(copy.page.content, UINT8)
        page = pb.Page(tokens=copy.tokens, tables=tables, content=content)
        page.checksum = self.checksum(page)
        return page

    def decode(self, page: pb.Page, tokens: bytes) -> TransferredPage:
        """Checks a copy that came, and returns its content.

        Args:
            page: The message.
            tokens: Bytes that the page's block hash was made from here.

        Raises:
            LinkError: The copy has other tokens, other tables, another size or a wrong checksum.
        """
        if page.tokens != tokens:
            raise LinkError("a page has come whose tokens are others than those asked for")
        tables = unpacked(page.tables, UINT8, len(self.needed), "the tables of a page").astype(np.bool_)
        if not all(there or needed is not None for there, needed in zip(tables.tolist(), self.needed, strict=True)):
            raise LinkError("a page has come without that of a group whose tokens see all before them")
        count = int(np.count_nonzero(tables))
        content = unpacked(page.content, UINT8, count * self.page_bytes, "a page")
        if self.checksum(page) != page.checksum:
            raise LinkError("a page has come whose checksum is wrong")
        return TransferredPage(tables, content.reshape(count, self.page_bytes))


class PagePort(Protocol):
    """An engine's KV pages, for its end of the link. Methods run on the link's loop."""

    form: PageForm

    def block_hashes(self, submit: Submit) -> list[list[tuple[BlockHash, bytes]]]:
        """Returns the pages that each sequence of a request could start from.

        Returns:
            The full pages of each sequence in order: block hash, and the bytes that it is made from beside the hash
                before it.
        """

    def read(self, hashes: Sequence[BlockHash], size: int) -> AsyncIterator[list[PageCopy]]:
        """Copies consecutive pages of a sequence, up to the last one that the engine has and another can go on after.

        Args:
            hashes: Their block hashes.
            size: Bytes to copy at one time, or one page if that has more. It takes time of the engine's thread between
                two steps.

        Yields:
            The next copies, at least one. Of groups with windows and of recurrent states they have what a sequence
            needs that goes on after the last copy.

        Raises:
            EngineEnded: The engine has ended.
        """

    def compute_seconds(self, tokens: int) -> float | None:
        """Returns the seconds that the engine needs to compute this count of tokens; None where that is not known."""


def joined_hashes(hashes: Sequence[BlockHash]) -> pb.PagesRequest:
    return pb.PagesRequest(hashes=b"".join(hashes))


def asked_hashes(request: pb.PagesRequest) -> list[BlockHash]:
    """Returns the block hashes of a request. Raises LinkError where they are cut off."""
    if len(request.hashes) % HASH_BYTES:
        raise LinkError(f"block hashes have {len(request.hashes)} bytes, each has {HASH_BYTES}")
    return [request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES)]
