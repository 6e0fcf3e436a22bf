"""Block hashes: chained keyed hashes of everything that a page's keys and values depend on, and of its sharing scope.

hash(i) = BLAKE2b-256(key; hash(i - 1) | tokens of page i | other inputs of page i). The key is derived from the secret,
the model's identity and the page size.

A hash stands for the sequence from its first token to the end of the page. So equal prefixes have equal hashes in every
engine with the same secret. Without the secret, no client can construct a collision or test guessed text against a
hash. The chain is vLLM's; keyed BLAKE2 is RFC 7693.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BlockHash = bytes
Tokens = NDArray[np.int32]

HASH_BYTES = 32
DEFAULT_TENANT = "default"
_PUBLIC = b"\0public"  # equals no tenant's scope: `_fields` encodes that behind its length


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions start .. end - 1 of a prompt, which stand for an image.

    Attributes:
        start: First position.
        end: Position after the last one.
        digest: Digest of the image's content.
    """

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Scope:
    """Sharing scope of a sequence's pages, and their inputs beside tokens and model.

    Attributes:
        tenant: Only sequences of the same tenant share pages.
        salt: Narrows sharing within the tenant to requests with the same salt.
        public: Length, in tokens, of the leading prefix that the operator has declared public. All tenants share its
            full pages; requests with a salt do not.
        images: Images of the prompt, in order.
        bidirectional: Length, in tokens, of the bidirectional prefix: the KV of each of its tokens depends on all of
            them. 0 for causal models.
    """

    tenant: str = DEFAULT_TENANT
    salt: str = ""
    public: int = 0
    images: tuple[ImageSpan, ...] = ()
    bidirectional: int = 0


def _fields(parts: Iterable[bytes]) -> bytes:
    """Encodes each part behind its length, so that no two lists have the same encoding."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class BlockHasher:
    """Hashes pages of one model.

    Args:
        secret: Key of at least 16 bytes; engines that may share pages have the same one.
        model: Identity of the model: weights, adapter, KV dtype and layout, on which the numbers in a page depend.
        page_size: Tokens a page.

    Raises:
        ValueError: The secret is shorter than 16 bytes.
    """

    def __init__(self, secret: bytes, model: bytes, page_size: int) -> None:
        if len(secret) < 16:
            raise ValueError(f"the secret of block hashes has {len(secret)} bytes, must have at least 16")
        self.page_size = page_size
        key = hashlib.blake2b(_fields((secret, model, page_size.to_bytes(8, "little"))), digest_size=32).digest()
        self._keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)

    def chain(self, scope: Scope = Scope()) -> "HashChain":
        return HashChain(self, scope)

    def link(self, parent: BlockHash, contents: Iterable[bytes]) -> list[BlockHash]:
        """Hashes consecutive pages.

        Args:
            parent: Hash of the page before the first one.
            contents: Contents of the pages, as in `HashChain`.

        Returns:
            One hash a page.
        """
        keyed, hashes = self._keyed, []
        for content in contents:
            # A copied state has absorbed the key already: 0.24 ms instead of 0.35 for 512 pages of 16 tokens.
            state = keyed.copy()
            state.update(parent + content)
            parent = state.digest()
            hashes.append(parent)
        return hashes


class HashChain:
    """Block hashes of the full pages of one sequence, extended as its tokens become known.

    Invariant: `hashes` and `contents` have one entry for each page hashed so far. Both only grow.

    Attributes:
        hashes: Block hash of each page.
        contents: Input of each hash beside its parent: the page's tokens (little-endian int32), then for some pages
            their sharing scope or their images.
        scope: Sharing scope of the sequence.
    """

    __slots__ = ("_first_plain", "_hasher", "contents", "hashes", "scope")

    def __init__(self, hasher: BlockHasher, scope: Scope) -> None:
        self._hasher, self.scope = hasher, scope
        self.hashes: list[BlockHash] = []
        self.contents: list[bytes] = []
        special = max(scope.public, scope.bidirectional, max((image.end for image in scope.images), default=0))
        self._first_plain = special // hasher.page_size + 1  # from this page on, `_extras` yields nothing

    def extend(self, tokens: Tokens) -> None:
        """Hashes the full pages of the tokens that follow the pages hashed so far.

        Args:
            tokens: [n] int32. Tokens after the hashed pages. The first call must contain the whole bidirectional
                prefix, which the hash of page 0 depends on. Tokens after the last full page are ignored.
        """
        size, done = self._hasher.page_size, len(self.hashes)
        pages, width = len(tokens) // size, 4 * size
        if not pages:
            return
        raw = tokens[: pages * size].astype("<i4").tobytes()
        contents = [raw[at : at + width] for at in range(0, len(raw), width)]
        for i, extra in self._extras(tokens, done, done + pages):
            contents[i - done] += extra
        self.contents.extend(contents)
        parent = self.hashes[-1] if done else bytes(HASH_BYTES)
        self.hashes.extend(self._hasher.link(parent, contents))

    def extend_by_page(self, index: int, content: bytes) -> None:
        """Hashes one page of which nothing but the tokens matters: a fast path of `extend` for decoding rows.

        Does nothing where the page is not the next one, or where it has other inputs; `extend` hashes it then.

        Args:
            index: Index of the page in the sequence.
            content: The page's tokens, little-endian int32.
        """
        # Legal from `_first_plain` on, which is at least 1: no extras, and a hash to chain to.
        if index == len(self.hashes) >= self._first_plain:
            self.contents.append(content)
            self.hashes += self._hasher.link(self.hashes[-1], (content,))

    def copy(self) -> "HashChain":
        """Returns an independent chain with the same hashes, for a fork of the sequence."""
        twin = HashChain(self._hasher, self.scope)
        twin.hashes, twin.contents = self.hashes.copy(), self.contents.copy()
        return twin

    def _extras(self, tokens: Tokens, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yields the inputs of pages start .. end - 1 beside their tokens and parents, each with its page's index."""
        scope, size = self.scope, self._hasher.page_size
        public = 0 if scope.salt or scope.bidirectional else scope.public // size
        if start == 0 and public:
            yield 0, _PUBLIC
        # The scope is an input of the first page that is not public: hashes are chained, so all later ones have it too.
        if start <= public < end:
            yield public, _fields((b"", scope.tenant.encode(), scope.salt.encode()))
        if start == 0 and scope.bidirectional:
            yield 0, _fields((b"whole", self._bidirectional_digest(tokens)))
        for image in scope.images:
            for i in range(max(image.start // size, start), min(-(-image.end // size), end)):
                yield i, _fields((b"image", b"%d %d" % (image.start, image.end), image.digest))

    def _bidirectional_digest(self, tokens: Tokens) -> bytes:
        """Digests the tokens of the bidirectional prefix, and the sequence's images."""
        scope = self.scope
        images = [b"%d %d %b" % (image.start, image.end, image.digest) for image in scope.images]
        content = _fields((tokens[: scope.bidirectional].astype("<i4").tobytes(), *images))
        return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()
