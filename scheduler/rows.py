"""Running sequences as arrays indexed by batch row: what the scheduler knows of each, and the checks that end them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.matching import Awaited
from cache_manager.page_names import Name, PageChain
from scheduler.events import Submit
from scheduler.request import Request

Index = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """What a row needs when it is queued again. emitted: output tokens known so far. submitted: seconds on the engine's
    clock. order: place in line, by priority and then first come, kept over preemptions. preempted: it was served
    before, or another of its attempt was. chain: names of its full pages, None without a prefix cache. awaited: a page
    that it waits for another sequence to compute. lost: tokens whose KV was computed before it was preempted. index: of
    the sequence in its request; siblings: of those that go on from its prompt once it is computed. alone: steps that it
    goes beside no other attempt. brought: as in `Submit`, until it starts.
    """

    attempt: int
    request: Request
    emitted: NDArray[np.int32]
    submitted: float
    order: int
    preempted: bool = False
    chain: PageChain | None = None
    awaited: Awaited | None = None
    lost: int = 0
    index: int = 0
    siblings: tuple[int, ...] = ()
    alone: int = 0
    brought: Mapping[Name, NDArray[np.uint8]] = field(default_factory=dict)

    def extended(self, index: int, token: int) -> "Sequence":
        """The sequence of this index in the same request that goes on from this one with a token."""
        order = self.order + index - self.index
        emitted = np.append(self.emitted, np.int32(token))
        return replace(self, index=index, order=order, emitted=emitted, preempted=True, chain=None, siblings=())

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.index

    @property
    def tenant(self) -> str:
        return self.request.scope.tenant

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.emitted)

    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate((self.request.prompt, self.emitted))


def sequences_of(submit: Submit, now: float, order: int) -> list[Sequence]:
    """What is to be run of an attempt: a sequence that has output goes on by itself, all others from one prompt. order:
    of the first one.
    """
    request = submit.request
    count = request.count if request.beam is None else request.beam.width
    emitted = submit.emitted or ((),) * count
    fresh = [index for index, tokens in enumerate(emitted) if tokens == ()]
    return [
        Sequence(
            submit.attempt,
            request,
            np.array(tokens, np.int32),
            now,
            order + index,
            index=index,
            siblings=() if tokens else tuple(fresh[1:]),
            alone=submit.alone,
            brought=submit.brought,
        )
        for index, tokens in enumerate(emitted)
        if tokens or index in fresh[:1]
    ]


class Rows:
    """`size` rows. A row is in use while its serial is above 0; serials are never used twice, so a result that was
    planned for an earlier sequence of a row is told apart.

    prompt: prompt tokens. emitted: output tokens committed. length: all tokens, drawn ones in flight included.
    scheduled: tokens whose KV is computed or being computed. goal: length at which the sequence ends. last_step: the
    last step that touches the row's pages. lost: tokens whose KV was computed before a preemption. siblings: sequences
    that will go on from this one's prompt; rows are kept free for them. searches: whether the row is a beam search's,
    which says what it goes on with. whole: tokens at the front that are computed in one step, all that are left.
    departures: rows that were removed so far. tenant: whose they are, by `tenant_number`.
    """

    def __init__(self, size: int) -> None:
        self.serial = np.zeros(size, np.int64)
        self.attempt = np.zeros(size, np.int64)
        self.index = np.zeros(size, np.int32)
        self.siblings = np.zeros(size, np.int32)
        self.searches = np.zeros(size, np.bool_)
        self.whole = np.zeros(size, np.int32)
        self.prompt = np.zeros(size, np.int32)
        self.emitted = np.zeros(size, np.int32)
        self.length = np.zeros(size, np.int32)
        self.scheduled = np.zeros(size, np.int32)
        self.goal = np.zeros(size, np.int32)
        self.order = np.zeros(size, np.int64)
        self.tenant = np.zeros(size, np.int32)
        self.last_step = np.full(size, -1, np.int64)
        self.lost = np.zeros(size, np.int32)
        self._last = np.zeros(size, np.int32)  # position of the last token in the output
        self._stops = np.full((size, 4), -1, np.int32)
        self._outputs = np.zeros((size, 64), "<i4")  # as page names want them
        self._sequences: list[Sequence | None] = [None] * size
        self._free = list(range(size - 1, -1, -1))
        self._serials = 0
        self.departures = 0
        self._row_of: dict[tuple[int, int], int] = {}
        self._tenants: dict[str, int] = {}
        self._active: Index | None = None

    @property
    def size(self) -> int:
        return len(self.serial)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    @property
    def free(self) -> int:
        """Rows that a new sequence can have."""
        return len(self._free) - int(self.siblings.sum())

    @property
    def tenants(self) -> int:
        """That have a number."""
        return len(self._tenants)

    def tenant_number(self, tenant: str) -> int:
        """A new one gets the next."""
        return self._tenants.setdefault(tenant, len(self._tenants))

    def row_of(self, attempt: int, index: int = 0) -> int | None:
        return self._row_of.get((attempt, index))

    def attempts(self) -> list[int]:
        """Of each row in use."""
        return [attempt for attempt, _ in self._row_of]

    def active(self) -> Index:
        """Rows in use, first come first."""
        if self._active is None:
            rows = np.flatnonzero(self.serial)
            self._active = rows[np.argsort(self.order[rows], kind="stable")].astype(np.int32)
        return self._active

    def add(self, sequence: Sequence) -> int:
        """Gives the sequence a free row; all of the row's state is set here."""
        row = self._free.pop()
        request, known = sequence.request, len(sequence.emitted)
        self._serials += 1
        self.serial[row] = self._serials
        self.attempt[row] = sequence.attempt
        self.index[row] = sequence.index
        self.siblings[row] = len(sequence.siblings)
        self.searches[row] = request.beam is not None
        self.whole[row] = request.scope.whole
        self.prompt[row] = len(request.prompt)
        self.emitted[row] = known
        self.length[row] = sequence.length
        self.scheduled[row] = 0
        self.goal[row] = len(request.prompt) + request.max_tokens
        self._last[row] = request.max_tokens - 1
        self.order[row] = sequence.order
        self.tenant[row] = self.tenant_number(sequence.tenant)
        self.last_step[row] = -1
        self.lost[row] = sequence.lost
        self._stops = _with_columns(self._stops, len(request.stop_ids), -1)
        self._stops[row] = -1
        self._stops[row, : len(request.stop_ids)] = request.stop_ids
        self._outputs = _with_columns(self._outputs, known + 1, 0)
        self._outputs[row, :known] = sequence.emitted
        self._sequences[row] = sequence
        self._row_of[sequence.key] = row
        self._active = None
        return row

    def take_siblings(self, row: int) -> list[Sequence]:
        """The sequences that rows were kept free for, as far as this one. Their chains are still to be set."""
        parent = self.sequence(row)
        siblings, parent.siblings, self.siblings[row] = parent.siblings, (), 0
        return [
            replace(parent, index=index, order=parent.order + index - parent.index, chain=None, lost=0)
            for index in siblings
        ]

    def sequence(self, row: int) -> Sequence:
        """The row's sequence with all committed output, as it would be queued again."""
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} is free")
        sequence.emitted = self._outputs[row, : self.emitted[row]].copy()
        return sequence

    def name_pages(self, row: int, computed: int, page_size: int) -> None:
        """Extends the chain of the row's sequence over its full pages below position `computed`."""
        sequence = self._sequences[row]
        if sequence is None or sequence.chain is None:
            return
        named = len(sequence.chain.names) * page_size
        if computed - named >= page_size:
            prompt, outputs = sequence.request.prompt, self._outputs[row]
            start, end = named - len(prompt), computed - len(prompt)
            sequence.chain.extend(np.concatenate((prompt[named:computed], outputs[max(start, 0) : max(end, 0)])))

    def name_next(self, rows: Index, full: Index, page_size: int) -> None:
        """As `name_pages`, for the last of so many full pages of these rows, where it is all output and all pages
        before it are named.
        """
        for row, pages in zip(rows.tolist(), full.tolist(), strict=True):
            sequence = self._sequences[row]
            if sequence is not None and sequence.chain is not None:
                first = (pages - 1) * page_size - len(sequence.request.prompt)
                if first >= 0:
                    sequence.chain.extend_by_page(pages - 1, self._outputs[row, first : first + page_size].tobytes())

    def remove(self, row: int) -> None:
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} is free")
        del self._row_of[sequence.key]
        self.departures += 1
        self._sequences[row] = None
        self.serial[row] = self.siblings[row] = 0
        self._free.append(row)
        self._active = None

    def append(self, rows: Index, tokens: Index) -> tuple[Index, NDArray[np.bool_], NDArray[np.bool_]]:
        """Commits one drawn token to each of these distinct rows.

        Returns each token's output position, whether it is a stop token of its row, whether it is the last that fits.
        """
        positions = self.emitted[rows]
        if len(rows):
            self._outputs = _with_columns(self._outputs, int(positions.max()) + 1, 0)
        self._outputs[rows, positions] = tokens
        self.emitted[rows] = positions + 1
        stops = self._stops[rows] == tokens[:, None]
        stopped = stops.any(axis=1) if np.count_nonzero(stops) else np.zeros(len(rows), np.bool_)
        return positions, stopped, positions >= self._last[rows]


def _with_columns(array: NDArray[np.int32], columns: int, fill: int) -> NDArray[np.int32]:
    """The array, or a wider copy of it with at least so many columns."""
    have = array.shape[1]
    if columns <= have:
        return array
    return np.pad(array, ((0, 0), (0, max(columns, 2 * have) - have)), constant_values=fill)
