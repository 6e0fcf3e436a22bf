"""KV pages on the link: what an engine gives of them to others like it, and how these check what they get.

A page counts for its tokens only where the engine that wants it has made its name itself, the tokens that come with it
are those of that name, and its bytes have the checksum that they came with, which covers what their numbers mean.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.page_names import NAME_BYTES, Name
from rpc.link.arrays import UINT8, LinkError, packed, unpacked
from scheduler.events import Submit


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """tokens: what its name is made from beside the name before it. content: uint8 [groups, page_bytes]."""

    tokens: bytes
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageForm:
    """What a copy of a page has to be. numerics: what the numbers in it depend on."""

    groups: int
    page_bytes: int
    page_size: int
    numerics: bytes

    @property
    def size(self) -> int:
        """Bytes of a copy."""
        return self.groups * self.page_bytes

    def checksum(self, content: bytes) -> int:
        return zlib.crc32(content, zlib.crc32(self.numerics))

    def encode(self, copy: PageCopy) -> pb.Page:
        content = packed(copy.content, UINT8)
        return pb.Page(tokens=copy.tokens, content=content, checksum=self.checksum(content))

    def decode(self, page: pb.Page, tokens: bytes) -> NDArray[np.uint8]:
        """tokens: what it must be a page of. Returns uint8 [groups, page_bytes]. Raises LinkError."""
        if page.tokens != tokens:
            raise LinkError("a page has come whose tokens are others than those asked for")
        content = unpacked(page.content, UINT8, self.size, "a page")
        if self.checksum(page.content) != page.checksum:
            raise LinkError("a page has come whose checksum is wrong")
        return content.reshape(self.groups, self.page_bytes)


class PagePort(Protocol):
    """An engine's KV pages, for its end of the link. On the link's loop."""

    form: PageForm

    def named(self, submit: Submit) -> list[list[tuple[Name, bytes]]]:
        """Of each sequence that is to be run: the pages that it could go on from, each with what its name is made from
        beside the name before it.
        """

    async def read(self, names: Sequence[Name]) -> list[PageCopy]:
        """As many of these pages as the engine has, from the first one on. Raises EngineEnded. It takes the engine's
        time: a few at once.
        """

    def computing(self, tokens: int) -> float | None:
        """Seconds that so many tokens take, as far as is known."""


def joined_names(names: Sequence[Name]) -> pb.PagesRequest:
    return pb.PagesRequest(names=b"".join(names))


def asked_names(request: pb.PagesRequest) -> list[Name]:
    """Raises LinkError."""
    if len(request.names) % NAME_BYTES:
        raise LinkError(f"names have {len(request.names)} bytes, each has {NAME_BYTES}")
    return [request.names[at : at + NAME_BYTES] for at in range(0, len(request.names), NAME_BYTES)]
