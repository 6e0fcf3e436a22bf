"""How many bytes keys and values take: the arithmetic behind pool sizes, estimates and admission.

Only K and V of the KV heads are kept, never queries, so a token costs 2 x layers x KV heads x head_dim x bytes an
element. Layers that look no further back than a window keep the pages within it only.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

MOST_TOKENS = 2**31 - 1


def layer_groups(windows: Sequence[int | None]) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """`groups` and `windows` of a layout, from the window of each layer: as few groups as can have equally many layers.

    A group without a window, if there is one, comes first.
    """
    layers: dict[int | None, list[int]] = {None: []} if None in windows else {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    size = gcd(*map(len, layers.values()))
    cut = [(window, tuple(of[i : i + size])) for window, of in layers.items() for i in range(0, len(of), size)]
    return tuple(group for _, group in cut), tuple(window for window, _ in cut) if layers.keys() - {None} else ()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model.

    groups: layer numbers by layer group; layers of a group share page tables. Llama has one group. A page id addresses
    as many bytes in every group, so groups have equally many layers. scale_bytes: beside the elements, for each token
    and head, K and V apart (8-bit KV). windows: by group, how many tokens a token sees, itself included, or None for
    all before it; () where all groups see all.
    """

    groups: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    element_bytes: int
    page_size: int
    scale_bytes: int = 0
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page size is {self.page_size}, must be at least 1 token")
        if not self.groups or len({len(group) for group in self.groups}) != 1:
            raise ValueError(f"layer groups must have equally many layers, got {[len(g) for g in self.groups]}")
        if self.windows and len(self.windows) != len(self.groups):
            raise ValueError(f"{len(self.groups)} layer groups have {len(self.windows)} windows")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows are {self.windows}, each must be at least 1 token")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: page_size tokens in all layers of one group."""
        a_head = self.head_dim * self.element_bytes + self.scale_bytes
        return 2 * len(self.groups[0]) * self.kv_heads * a_head * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all groups."""
        return self.page_bytes * len(self.groups) // self.page_size

    def window(self, group: int) -> int | None:
        return self.windows[group] if self.windows else None

    def pages_before(self, window: int) -> int:
        """Pages that the first token of a page sees beside its own; 1 at least, so that there is one to go on from."""
        return max(1, -(-(window - 1) // self.page_size))

    def pages_within(self, window: int, ahead: int) -> int:
        """Most pages that a sequence holds of a group with this window while `ahead` of its tokens are computed."""
        return -(-(max(window, self.page_size) - 1 + ahead) // self.page_size) + 1

    def pages_for(self, tokens: int, ahead: int = MOST_TOKENS) -> int:
        """Pages, over all groups, of a sequence that holds so many tokens, of which at most `ahead` are being computed
        at one time: what is further back than a window is gone by then.
        """
        whole = -(-tokens // self.page_size)
        windows = self.windows or (None,) * len(self.groups)
        return sum(whole if window is None else min(whole, self.pages_within(window, ahead)) for window in windows)

    def tokens_in(self, pages: int, ahead: int = MOST_TOKENS) -> int:
        """Tokens that so many pages hold for a single sequence; no more than `MOST_TOKENS`."""
        most = range(MOST_TOKENS // self.page_size + 1)
        return (bisect_right(most, pages, key=lambda n: self.pages_for(n * self.page_size, ahead)) - 1) * self.page_size
