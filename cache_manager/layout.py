"""Sizes of keys and values in bytes and pages: the arithmetic behind pool sizes, estimates and admission.

A token costs, in each layer, `KVShape.elements` x bytes an element, and scales with 8-bit KV. Layers with a window keep
only the pages within it.

Layers are cut into groups, each with page tables of its own, as in vLLM's hybrid KV cache manager. All groups take
pages of one size from one pool. If layers differ in shape, groups differ in how many layers fill a page.

A recurrent layer keeps a state of fixed size instead of KV: `cache_manager.states` cuts it into pages.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd, lcm

from cache_manager.states import RecurrentLayer, StateCut, cut_states

MOST_TOKENS = 2**31 - 1
TOKENS_TOGETHER = 16  # tokens that kernels read together, where a page has a multiple of them
STATE_WINDOW = 2  # entries: see `KVLayout.windows`
CHECKPOINT_COST = 2  # memory of a checkpoint, in times the KV of its tokens
MOST_INTERVAL = 1024  # tokens between two checkpoints: a prefix hit computes up to as many again


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token in one layer.

    Attributes:
        heads: KV heads.
        key_dim: Elements of a key of one head.
        value_dim: Elements of a value of one head.
        latent: Whether a value is the first elements of its key, so that keys alone are kept (latent attention).
    """

    heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """Elements of what is kept of a head: its key and, unless it is in the key, its value."""
        return (self.key_dim,) if self.latent else (self.key_dim, self.value_dim)

    @property
    def elements(self) -> int:
        return self.heads * sum(self.kept)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share page tables: all have one window, and KV of one shape.

    Attributes:
        layers: Layer numbers.
        shape: KV of each of these layers.
        window: Tokens that a token sees, itself included; None for all tokens before it.
        chunked: Whether the window is a chunk: a token sees those since the last multiple of `window`. The cache keeps
            what a window of this size sees, which is all of a chunk.
    """

    layers: tuple[int, ...]
    shape: KVShape
    window: int | None = None
    chunked: bool = False


def layer_groups(
    shapes: Sequence[KVShape], windows: Sequence[int | None], chunked: bool = False
) -> tuple[LayerGroup, ...]:
    """Cuts layers into groups, so that a token takes the fewest bytes, then the fewest groups.

    A page has as many bytes as the largest group needs, so a group with fewer bytes wastes the rest. Layers of equal
    shape are cut into groups with equally many layers, which waste nothing.

    Args:
        shapes: KV of each layer.
        windows: Window of each layer in tokens, None for a layer without one.
        chunked: Whether all windows are chunks.

    Returns:
        The groups. One without a window, if there is one, comes first.
    """
    alike: dict[tuple[int | None, KVShape], list[int]] = {}
    for layer, kind in enumerate(zip(windows, shapes, strict=True)):
        alike.setdefault(kind, []).append(layer)
    kinds = sorted(alike, key=lambda kind: kind[0] is not None)  # stable: otherwise in order of the first layer

    def counts(size: int) -> list[int]:
        """Returns the groups of each kind, where a page has room for `size` elements a token."""
        return [-(-len(alike[kind]) // (size // kind[1].elements)) for kind in kinds]

    largest = max(shape.elements for shape in shapes)
    sizes = {n * shape.elements for (_, shape), layers in alike.items() for n in range(1, len(layers) + 1)}
    size = min((s for s in sizes if s >= largest), key=lambda s: (s * sum(counts(s)), -s))
    return tuple(
        LayerGroup(part, shape, window, chunked and window is not None)
        for (window, shape), groups in zip(kinds, counts(size), strict=True)
        for part in _parts(alike[window, shape], groups)
    )


def _parts(layers: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cuts layers into `count` runs whose lengths differ by 1 at most."""
    ends = [len(layers) * i // count for i in range(count + 1)]
    return [tuple(layers[a:b]) for a, b in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model.

    Attributes:
        groups: The layer groups that keep KV. Llama has one.
        element_bytes: Bytes of an element.
        page_size: Tokens a page.
        scale_bytes: Bytes of scales beside the elements (8-bit KV), a token and head, once for each of K and V that is
            kept.
        recurrent: The recurrent layers. Their tables follow those of the groups: one for each page of a state.
        windows: Window of each table; () where no table has one. That of a state's table is 2: the next token needs the
            state before it, which may be that of the entry before its own.
        page_bytes: Bytes of one page, the same in every group: `page_size` tokens in all layers of the largest group.
            If groups differ, a multiple of what each group needs for the tokens that kernels read together.
        interval: Tokens of an entry of a state's table, a multiple of the page size; 0 without recurrent layers. An
            entry holds the state after its tokens: a checkpoint once all of them are computed.
        states: Places of the recurrent layers' states in pages.

    Raises:
        ValueError: The page size or a window is below 1, a group has no layers, or there are recurrent layers and no
            group without a window.
    """

    groups: tuple[LayerGroup, ...]
    element_bytes: int
    page_size: int
    scale_bytes: int = 0
    recurrent: tuple[RecurrentLayer, ...] = ()
    windows: tuple[int | None, ...] = field(init=False)
    page_bytes: int = field(init=False)
    interval: int = field(init=False)
    states: StateCut = field(init=False)

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page size is {self.page_size}, must be at least 1 token")
        if not self.groups or not all(group.layers for group in self.groups):
            raise ValueError(f"each layer group must have layers, got {[len(g.layers) for g in self.groups]}")
        windows = tuple(group.window for group in self.groups)
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"windows are {windows}, each must be at least 1 token")
        if self.recurrent and None not in windows:
            raise ValueError("recurrent layers need a group without a window, whose pages lead to their states")
        most = max(*map(self.group_bytes, range(len(self.groups))), *(one.largest for one in self.recurrent), 0)
        step = gcd(self.page_size, TOKENS_TOGETHER) * lcm(*map(self.layer_bytes, range(len(self.groups))))
        whole = self.same_shapes and not self.recurrent
        page_bytes = most if whole else -(-most // step) * step
        states = cut_states(self.recurrent, page_bytes)
        windows += (STATE_WINDOW,) * states.pages
        object.__setattr__(self, "windows", windows if any(window is not None for window in windows) else ())
        object.__setattr__(self, "page_bytes", page_bytes)
        object.__setattr__(self, "states", states)
        object.__setattr__(self, "interval", self._checkpoint_interval() if self.recurrent else 0)

    def _checkpoint_interval(self) -> int:
        """Returns the tokens between two checkpoints.

        A checkpoint takes at most `CHECKPOINT_COST` times the memory that the KV of these tokens takes, as long as it
        is not more than `MOST_INTERVAL` tokens away from the next one.
        """
        tokens = self.states.pages * self.page_bytes // (CHECKPOINT_COST * self.token_bytes) + 1
        return -(-min(tokens, MOST_INTERVAL) // self.page_size) * self.page_size

    @classmethod
    def uniform(
        cls,
        groups: Sequence[Sequence[int]],
        kv_heads: int,
        head_dim: int,
        element_bytes: int,
        page_size: int,
        scale_bytes: int = 0,
        windows: Sequence[int | None] = (),
    ) -> "KVLayout":
        """Returns the layout of layers of one shape.

        Args:
            groups: Layer numbers of each layer group.
            kv_heads: KV heads of a layer.
            head_dim: Elements of a key, and of a value, of one head.
            element_bytes: As the attribute.
            page_size: As the attribute.
            scale_bytes: As the attribute.
            windows: Window of each group; () where no group has one.
        """
        shape = KVShape(kv_heads, head_dim, head_dim)
        seen = windows or [None] * len(groups)
        made = tuple(LayerGroup(tuple(layers), shape, window) for layers, window in zip(groups, seen, strict=True))
        return cls(made, element_bytes, page_size, scale_bytes)

    def without_windows(self) -> "KVLayout":
        """Returns the layout that keeps the pages of all tokens in every group."""
        groups = tuple(replace(group, window=None, chunked=False) for group in self.groups)
        return KVLayout(groups, self.element_bytes, self.page_size, self.scale_bytes, self.recurrent)

    @property
    def tables(self) -> int:
        """Page tables of a row: one for each group, then one for each page of a state."""
        return len(self.groups) + self.states.pages

    @property
    def state_tables(self) -> range:
        """Numbers of the tables whose entries are states."""
        return range(len(self.groups), self.tables)

    def entry_tokens(self, table: int) -> int:
        """Returns the tokens of one entry of a page table."""
        return self.page_size if table < len(self.groups) else self.interval

    @property
    def same_shapes(self) -> bool:
        """Whether all groups have equally many layers of one shape, so that pages of all groups have one form."""
        return len({(len(group.layers), group.shape) for group in self.groups}) == 1

    def layer_bytes(self, group: int) -> int:
        """Returns the bytes of one token in one layer of a group."""
        shape = self.groups[group].shape
        return shape.elements * self.element_bytes + len(shape.kept) * shape.heads * self.scale_bytes

    def group_bytes(self, group: int) -> int:
        """Returns the bytes of a page that the layers of a group use."""
        return len(self.groups[group].layers) * self.layer_bytes(group) * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all groups. States of recurrent layers do not grow with tokens."""
        return self.page_bytes * len(self.groups) // self.page_size

    def window(self, table: int) -> int | None:
        return self.groups[table].window if table < len(self.groups) else STATE_WINDOW

    def pages_before(self, window: int) -> int:
        """Returns how many earlier pages the first token of a page sees.

        At least 1: a row publishes its next page under the node of the page before it.
        """
        return max(1, -(-(window - 1) // self.page_size))

    def pages_within(self, window: int, ahead: int, size: int | None = None) -> int:
        """Returns the most entries that a sequence holds in a table with a window.

        Args:
            window: Tokens that a token sees, itself included.
            ahead: Tokens of the sequence that are being computed at one time.
            size: Tokens of an entry; None: the page size.
        """
        size = size or self.page_size
        return -(-(max(window, size) - 1 + ahead) // size) + 1

    def pages_for(self, tokens: int, ahead: int = MOST_TOKENS) -> int:
        """Returns the pages, over all tables, of one sequence.

        Pages that lie wholly before a group's window do not count.

        Args:
            tokens: Length of the sequence.
            ahead: Tokens that are being computed at one time, at most.
        """
        pages = -(-tokens // self.page_size)
        if not self.windows:
            return pages * len(self.groups)
        windows = self.windows[: len(self.groups)]
        total = sum(pages if window is None else min(pages, self.pages_within(window, ahead)) for window in windows)
        if self.recurrent:
            most = self.pages_within(STATE_WINDOW, ahead, self.interval)
            total += self.states.pages * min(-(-tokens // self.interval), most)
        return total

    def tokens_in(self, pages: int, ahead: int = MOST_TOKENS) -> int:
        """Returns the longest sequence, in tokens of whole pages, that fits into pages; at most `MOST_TOKENS`.

        Args:
            pages: Pages over all groups.
            ahead: As in `pages_for`.
        """
        # `pages_for` never falls as tokens rise, so a binary search finds the longest.
        most = range(MOST_TOKENS // self.page_size + 1)
        return (bisect_right(most, pages, key=lambda n: self.pages_for(n * self.page_size, ahead)) - 1) * self.page_size
