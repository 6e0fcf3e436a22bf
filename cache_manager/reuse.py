"""The default eviction policy: keeps what is likely to be asked for again, as learned from the traffic itself.

Time is the number of pages that requests have used so far. When a request leaves, each of its pages falls into a class:
how many requests have used it, and what part of that request was new (or: it was the request's last page). Of each
class the policy learns how likely a page is asked for again at which age, from pages that are asked for again and pages
that are not; evicted ones are remembered for a while to that end (the estimate of Kaplan and Meier, 1958). A class with
few observations is drawn towards the classes around it.

A page's worth is then the best ratio, over all ways to keep it for a while, of expected hits to the expected time that
its place is taken: the index of Gittins, 1979. It is what least hit density (Beckmann et al., LHD, NSDI 2018)
approximates. As worth mostly rises and then falls with age, its minimum in a class is at the oldest or the newest page,
so only these two of each class are compared. Looking at the newest ones is what turns away one-time prompts; looking at
the oldest ones is what ages out the rest.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.ghosts import Ghosts
from cache_manager.page_names import Name
from cache_manager.runs import NodeRuns, Nodes, Run, Stretch

USES = 8  # more uses than this are all one
KINDS = 5  # of request: 0 its last page; 1 to 4, by how much of it was new
CLASSES = USES * KINDS
BINS_AN_OCTAVE = 2  # ages are told apart by a factor of sqrt 2
QUANTA = 8  # births are counted in quanta of capacity / 8 ...
EPOCHS = 256  # ... for the last 256: what is older than 32 times the capacity is not waited for any more
GHOSTS = 4  # evicted pages that are remembered, in two generations of this many times the capacity
MEMORY = 64  # capacities after which an observation has faded to 1 / e
SHRINK = 4  # requests' worth of pages that the classes around one weigh
PRIOR = 0.01  # probability of a hit in one age bin that is assumed of anything: least recently used, to begin with
Sums = tuple[list[float], list[float]]
WEAK = 0.1  # requests' worth of pages by which a class's level is drawn towards 1


Entry = tuple[int, int]
"""Time of the last request, negative in a heap of newest ones; node."""


@dataclass(slots=True)
class Queues:
    """Heaps of the offered nodes of one class. Entries of withdrawn nodes stay until they come to the front."""

    oldest: list[Entry] = field(default_factory=list)
    newest: list[Entry] = field(default_factory=list)


class ReuseAware:
    """Evicts what is worth least, see above. The pages of a run have one class and one age, so one worth.

    Args:
        pages: Pages of the pool.
    """

    name = "reuse"

    def __init__(self, pages: int) -> None:
        self._now = 0
        self._runs = NodeRuns()  # `kind` is the class, `last` is in pages used so far
        self._offered: set[int] = set()
        self._queues: dict[int, Queues] = {}  # by class
        self._ghosts = Ghosts(GHOSTS * pages)
        self._hazards = Hazards(pages)

    def __len__(self) -> int:
        return len(self._offered)

    def requests_of(self, node: int) -> int:
        """Requests that have used a node and left, up to `USES`."""
        return _requests(self._runs.run_of(node))

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:
        for part in self._ghosts.recall(names):
            returned = np.array(nodes[part.start : part.end])
            self._runs.take_out(returned)
            self._runs.put(returned, part.kind, part.last)

    def released(self, nodes: NDArray[np.int32]) -> None:
        count, places = len(nodes), nodes.astype(np.intp)
        self._now += count
        self._hazards.advance(self._now)
        stretches = self._runs.take_out(places)
        seen = Counter[tuple[int, int]]()
        for stretch in stretches:
            if stretch.run is not None:
                seen[stretch.run.last, stretch.run.kind] += len(stretch)
        self._hazards.close(seen, hit=True)
        newness = 1 + min(3, int(4 * (1 - seen.total() / count)))
        start = 0
        for level, end in _levels(stretches):
            if start < min(end, count - 1):
                self._wait_for(places[start : min(end, count - 1)], level * KINDS + newness)
            if end == count:  # the request's last page is a class of its own
                self._wait_for(places[-1:], level * KINDS)
            start = end

    def _wait_for(self, nodes: Nodes, kind: int) -> None:
        self._runs.put(nodes, kind, self._now)
        self._hazards.open(kind, len(nodes))

    def offer(self, node: int) -> None:
        kind, last = self._rank(node)
        self._offered.add(node)
        queues = self._queues.setdefault(kind, Queues())
        heapq.heappush(queues.oldest, (last, node))
        heapq.heappush(queues.newest, (-last, node))
        for heap, sign in ((queues.oldest, 1), (queues.newest, -1)):
            if len(heap) > 64 + 2 * len(self._offered):
                heap[:] = [entry for entry in set(heap) if self._valid(kind, sign * entry[0], entry[1])]
                heapq.heapify(heap)

    def withdraw(self, node: int) -> None:
        self._offered.discard(node)

    def choose(self, most: int) -> Nodes:
        best = (float("inf"), 0, -1)
        for kind, queues in list(self._queues.items()):
            for heap, sign in ((queues.oldest, 1), (queues.newest, -1)):
                while heap and not self._valid(kind, sign * heap[0][0], heap[0][1]):
                    heapq.heappop(heap)
                if heap:
                    last = sign * heap[0][0]
                    best = min(best, (self._hazards.worth(kind, self._now - last), last, heap[0][1]))
            if not queues.oldest and not queues.newest:
                del self._queues[kind]
        self._offered.remove(best[2])
        return self._runs.tail(best[2], most)

    def _rank(self, node: int) -> tuple[int, int]:
        """Class of a node, and when its last request left; -1 for none."""
        run = self._runs.run_of(node)
        return (0, -1) if run is None else (run.kind, run.last)

    def _valid(self, kind: int, last: int, node: int) -> bool:
        return node in self._offered and self._rank(node) == (kind, last)

    def evicted(self, nodes: Nodes, names: Sequence[Name]) -> None:
        for stretch in self._runs.take_out(nodes):
            if stretch.run is not None:  # else it was forgotten before any request has left it
                ghosts = list(names[stretch.start : stretch.end])[::-1]
                forgotten = self._ghosts.remember(ghosts, stretch.run.kind, stretch.run.last)
                self._hazards.close(forgotten, hit=False)


def _requests(run: Run | None) -> int:
    """Requests that have left the nodes of a run, up to `USES`."""
    return 0 if run is None else run.kind // KINDS + 1


def _levels(stretches: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Classes by use, once one more request has left.

    Returns:
        Level, 0 .. USES - 1, and end of each stretch of nodes that have the same one.
    """
    levels = list[tuple[int, int]]()
    for stretch in stretches:
        level = min(_requests(stretch.run), USES - 1)
        if levels and levels[-1][0] == level:
            levels.pop()
        levels.append((level, stretch.end))
    return levels


class Hazards:
    """How likely a page of each class is asked for again at each age, and what that makes it worth.

    Pages are open from one use to the next, or until they are forgotten.

    Args:
        capacity: Pages of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self._quantum = max(1, capacity // QUANTA)
        self._learn_every = capacity
        self.bins = int(np.log2(self._quantum * EPOCHS) * BINS_AN_OCTAVE) + 4
        edges = 2.0 ** (np.arange(self.bins + 1) / BINS_AN_OCTAVE)
        edges[0] = 0
        self._widths = np.diff(edges)
        self._hits = np.zeros((CLASSES, self.bins))
        self._closed = np.zeros((CLASSES, self.bins))
        self._open = np.zeros((EPOCHS, CLASSES))  # by epoch of their birth, a ring
        self._now = self._requests = self._epoch = self._learnt = 0
        # Of the classes and age bins that were asked for: few have pages that may be evicted.
        self._sums: dict[int, Sums] = {}
        self._worth: dict[tuple[int, int], float] = {}
        self._learn()

    def worth(self, kind: int, age: int) -> float:
        """What a page of a class is worth.

        Args:
            kind: Class.
            age: Pages used since its last request left.

        Returns:
            Expected hits for each page of time that its place is taken.
        """
        place = kind, self.age_bin(age)
        worth = self._worth.get(place)
        if worth is None:
            if kind not in self._sums:
                self._sums[kind] = _sums(self._hazard[kind], self._widths)
            worth = self._worth[place] = _gittins(self._sums[kind], place[1])
        return worth

    def age_bin(self, age: int) -> int:
        """Of half octaves: 2 log2 of the age, without rounding errors."""
        return min((age * age).bit_length() - 1, self.bins - 1) if age > 0 else 0

    def advance(self, now: int) -> None:
        """One more request has left."""
        self._now, self._requests = now, self._requests + 1
        epoch = now // self._quantum
        for e in range(self._epoch + 1, min(epoch, self._epoch + EPOCHS) + 1):
            self._closed[:, -1] += self._open[e % EPOCHS]  # too old: closed without a hit
            self._open[e % EPOCHS] = 0
        if epoch > self._epoch:
            fade = np.exp(-(epoch - self._epoch) / (MEMORY * QUANTA))
            self._hits *= fade
            self._closed *= fade
            self._epoch = epoch
        if now - self._learnt >= min(self._learn_every, self._learnt / 4):
            self._learn()

    def open(self, kind: int, pages: int) -> None:
        """Pages of a class are waited for from now on."""
        self._open[self._epoch % EPOCHS, kind] += pages

    def close(self, pages: Mapping[tuple[int, int], int], hit: bool) -> None:
        """Pages were asked for again, or are not waited for any more.

        Args:
            pages: Their number by birth and class.
            hit: Whether they were asked for.
        """
        for (birth, kind), count in sorted(pages.items()):
            epoch = birth // self._quantum
            if self._epoch - epoch < EPOCHS:  # older ones were closed when they fell off the ring
                age = self.age_bin(self._now - birth)
                self._open[epoch % EPOCHS, kind] -= count
                self._closed[kind, age] += count
                self._hits[kind, age] += count * hit

    def _learn(self) -> None:
        self._learnt = self._now
        exposed = self._exposed()
        mean = max(1.0, self._now / max(1, self._requests))  # pages a request: what is drawn on does not depend on size
        strength, weak = SHRINK * mean, WEAK * mean
        hits3, exposed3 = self._hits.reshape(USES, KINDS, -1), exposed.reshape(USES, KINDS, -1)
        overall = (self._hits.sum(0) + strength * PRIOR) / (exposed.sum(0) + strength)
        hits, seen = hits3.sum(1), exposed3.sum(1)
        level = (hits.sum(1) + weak) / ((seen * overall).sum(1) + weak)
        by_use = (hits + strength * np.minimum(0.9, level[:, None] * overall)) / (seen + strength)
        level2 = (hits3.sum(2) + weak) / ((exposed3 * by_use[:, None]).sum(2) + weak)
        self._hazard = np.minimum(0.95, by_use[:, None] * level2[:, :, None]).reshape(CLASSES, -1)
        self._sums.clear()
        self._worth.clear()

    def _exposed(self) -> NDArray[np.float64]:
        """[classes, age bins] pages that have come to this age or are in the middle of it."""
        epochs = self._epoch - np.arange(min(EPOCHS, self._epoch + 1))
        ages = np.maximum(self._now - epochs * self._quantum, 1)
        bins = np.minimum((np.log2(ages) * BINS_AN_OCTAVE).astype(int), self.bins - 1)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))  # ages ascend, so a bin's epochs stand together
        waiting = np.zeros_like(self._closed)
        waiting[:, bins[starts]] = np.add.reduceat(self._open[epochs % EPOCHS], starts).T
        reached = np.cumsum((self._closed + waiting)[:, ::-1], axis=1)[:, ::-1]
        return reached - 0.5 * waiting


def _sums(hazard: NDArray[np.float64], widths: NDArray[np.float64]) -> Sums:
    """Expected hits, and expected time in pages used, from the beginning of each age bin on, as seen from the first.

    Args:
        hazard: [bins] chance of a hit in a bin once its age is reached.
        widths: [bins] of the bins, in pages used.

    Returns:
        [bins + 1] of each; 0 after the last bin.
    """
    alive = np.cumprod(1 - hazard) / (1 - hazard)  # at the beginning of a bin
    # Sums from the end, so that those of great ages, which few pages reach, are not lost in those of small ones.
    hits = np.cumsum((alive * hazard)[::-1])[::-1]
    time = np.cumsum((alive * (widths * (1 - hazard / 2)))[::-1])[::-1]
    return [*hits.tolist(), 0.0], [*time.tolist(), 0.0]


def _gittins(sums: Sums, start: int) -> float:
    """Best ratio, over all horizons, of the chance of a hit to the time until it or the horizon.

    Args:
        sums: As `_sums` returns them.
        start: Age bin that the page is at the beginning of.

    Returns:
        Hits for each page used.
    """
    hits, time = sums
    here, now = hits[start], time[start]
    return max((here - after) / (now - then) for after, then in zip(hits[start + 1 :], time[start + 1 :], strict=True))
