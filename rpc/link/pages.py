"""KV pages on the link: the copies that an engine gives to others of the same model, and their checks.

An engine takes a copy for a page only under three conditions. It has computed the page's block hash itself. The tokens
that come with the copy are those of that hash. The bytes have the checksum that they came with, which also covers the
numerics.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from quire.engine.v1 import engine_service_pb2 as pb

from cache_manager.block_hash import HASH_BYTES, BlockHash
from rpc.link.arrays import UINT8, LinkError, packed, unpacked
from scheduler.events import Submit


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """Copy of a page.

    Attributes:
        tokens: Bytes that its block hash is made from, beside the hash before it.
        content: uint8 [groups, page_bytes], in canonical form.
    """

    tokens: bytes
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageForm:
    """Form of the copies of one engine's pages.

    Attributes:
        groups: Count of groups.
        page_bytes: Bytes of a page in one group.
        page_size: Tokens of a page.
        numerics: See `EngineInfo`.
    """

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
        """Checks a copy that came, and returns its content, uint8 [groups, page_bytes].

        Args:
            page: The message.
            tokens: Bytes that the page's block hash was made from here.

        Raises:
            LinkError: The copy has other tokens, another size or a wrong checksum.
        """
        if page.tokens != tokens:
            raise LinkError("a page has come whose tokens are others than those asked for")
        content = unpacked(page.content, UINT8, self.size, "a page")
        if self.checksum(page.content) != page.checksum:
            raise LinkError("a page has come whose checksum is wrong")
        return content.reshape(self.groups, self.page_bytes)


class PagePort(Protocol):
    """An engine's KV pages, for its end of the link. Methods run on the link's loop."""

    form: PageForm

    def block_hashes(self, submit: Submit) -> list[list[tuple[BlockHash, bytes]]]:
        """Returns the pages that each sequence of a request could start from.

        Returns:
            The full pages of each sequence in order: block hash, and the bytes that it is made from beside the hash
                before it.
        """

    async def read(self, hashes: Sequence[BlockHash]) -> list[PageCopy]:
        """Copies pages, from the first one to the last before one that the engine lacks.

        It takes time of the engine's thread between two steps, so a call asks for few pages.

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
        raise LinkError(f"names have {len(request.hashes)} bytes, each has {HASH_BYTES}")
    return [request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES)]
