"""How many bytes keys and values take: the arithmetic behind pool sizes, estimates and admission.

Only K and V of the KV heads are kept, never queries, so a token costs 2 x layers x KV heads x head_dim x bytes an
element.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model.

    groups: layer numbers by layer group; layers of a group share page tables. Llama has one group. A page id addresses
    as many bytes in every group, so groups have equally many layers. scale_bytes: beside the elements, for each token
    and head, K and V apart (8-bit KV).
    """

    groups: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    element_bytes: int
    page_size: int
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page size is {self.page_size}, must be at least 1 token")
        if not self.groups or len({len(group) for group in self.groups}) != 1:
            raise ValueError(f"layer groups must have equally many layers, got {[len(g) for g in self.groups]}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: page_size tokens in all layers of one group."""
        a_head = self.head_dim * self.element_bytes + self.scale_bytes
        return 2 * len(self.groups[0]) * self.kv_heads * a_head * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all groups."""
        return self.page_bytes * len(self.groups) // self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages, over all groups, of a sequence that holds so many tokens."""
        return -(-tokens // self.page_size) * len(self.groups)

    def tokens_in(self, pages: int) -> int:
        """Tokens that so many pages hold for a single sequence."""
        return pages // len(self.groups) * self.page_size
