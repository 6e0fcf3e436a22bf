"""The default eviction policy: keeps pages that are likely to be requested again, as learned from the traffic.

Time is the number of pages that requests have used so far. When a request leaves, each of its pages gets a class from
two features: how many requests have used the page, and what part of the last request was new. The last page of a
request has a class of its own.

For each class the policy learns the probability of another request at each age, its hazard, with the estimator of
Kaplan and Meier, 1958. Evicted pages are remembered for a while as ghosts, so that requests for them count too. The
hazard of a class with few observations is shrunk towards its neighbours'.

A page's worth is the best ratio, over all horizons, of expected hits to the expected time that it occupies memory: the
index of Gittins, 1979. Least hit density (Beckmann et al., LHD, NSDI 2018) approximates it. Worth mostly rises and then
falls with age. So its minimum in a class is at the oldest or the newest page, and only these two are compared: the
newest to evict one-time prompts at once, the oldest to age out the rest.

Estimates err where capacities are small or where age alone matters. So the policy is held to least recently used
(`cache_manager.guard`): it counts exactly what that policy would hit, and falls back to it before it loses much.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash
from cache_manager.ghosts import Ghosts
from cache_manager.guard import RecencyGuard
from cache_manager.runs import NodeRuns, Nodes, Run, Stretch

USES = 8  # levels of use: pages with more uses are in the last one
KINDS = 5  # kinds within a level: 0, the last page of its request; 1 to 4, by the part of the request that was new
CLASSES = USES * KINDS
BINS_AN_OCTAVE = 2  # age bins grow by a factor of sqrt 2
QUANTA = 8  # births are counted in epochs of capacity / 8 ...
EPOCHS = 256  # ... for the last 256: a page older than 32 times the capacity counts as not requested again
GHOSTS = 4  # capacity of a generation of ghosts, in capacities of the pool
MEMORY = 64  # capacities of the pool after which an observation has faded to 1 / e
SHRINK = 4  # weight of the classes around one, in requests' worth of pages
PRIOR = 0.01  # hit probability in an age bin before any observation; equal for all, so the policy starts as LRU
Sums = tuple[list[float], list[float]]
WEAK = 0.1  # weight, in requests' worth of pages, that shrinks a class's level towards 1


Entry = tuple[int, int]
"""Time of the last request (negative in a heap of newest ones), and node."""


@dataclass(slots=True)
class Queues:
    """Heaps of the offered nodes of one class. Entries of withdrawn nodes stay until they come to the front.

    Attributes:
        oldest: Heap with the node whose last request left longest ago in front.
        newest: Heap with the node whose last request left last in front.
    """

    oldest: list[Entry] = field(default_factory=list)
    newest: list[Entry] = field(default_factory=list)


class ReuseAware:
    """Evicts the pages of least worth, as the module's docstring says.

    The pages of a run have one class and one age, so one worth.

    Args:
        pages: Pages of the pool.

    Attributes:
        guard: Holds the policy to least recently used.
    """

    name = "reuse"

    def __init__(self, pages: int) -> None:
        self._now = 0
        self._runs = NodeRuns()  # `kind` is the class; `last` is in pages used so far, as `_now` is
        self._offered: set[int] = set()
        self._queues: dict[int, Queues] = {}  # by class
        self._ghosts = Ghosts(GHOSTS * pages)
        self._hazards = Hazards(pages)
        self.guard = RecencyGuard(pages)
        self._chosen = -1  # the node that `choose` returned last

    def __len__(self) -> int:
        return len(self._offered)

    def requests_of(self, node: int) -> int:
        """Returns the number of requests that have used a node and left, up to `USES`."""
        return _requests(self._runs.run_of(node))

    def published(self, nodes: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        for part in self._ghosts.recall(hashes):
            returned = np.array(nodes[part.start : part.end])
            self._runs.take_out(returned)
            self._runs.put(returned, part.kind, part.last, evicted=True)

    def released(self, nodes: NDArray[np.int32]) -> None:
        count, places = len(nodes), nodes.astype(np.intp)
        self._now += count
        self._hazards.advance(self._now)
        stretches = self._runs.take_out(places)
        seen = dict[tuple[int, int], int]()
        returned, held = dict[int, int](), 0
        for stretch in stretches:
            if stretch.run is not None:
                last, pages = stretch.run.last, len(stretch)
                seen[last, stretch.run.kind] = seen.get((last, stretch.run.kind), 0) + pages
                returned[last] = returned.get(last, 0) + pages
                held += 0 if stretch.run.evicted else pages
        self._hazards.close(seen, hit=True)
        self.guard.used(self._now, count, held, returned)
        newness = 1 + min(3, int(4 * (1 - sum(seen.values()) / count)))
        start = 0
        for level, end in _levels(stretches):
            if start < min(end, count - 1):
                self._wait_for(places[start : min(end, count - 1)], level * KINDS + newness)
            if end == count:  # the request's last page is a class of its own
                self._wait_for(places[-1:], level * KINDS)
            start = end

    def _wait_for(self, nodes: Nodes, kind: int) -> None:
        """Gives nodes a class, from which they are observed until the next request."""
        self._runs.put(nodes.copy(), kind, self._now)  # a view would keep the memory of all the request's nodes
        self._hazards.open(kind, len(nodes))

    def offer(self, node: int) -> None:
        kind, last = self._rank(node)
        self._offered.add(node)
        queues = self._queues.setdefault(kind, Queues())
        heapq.heappush(queues.oldest, (last, node))
        heapq.heappush(queues.newest, (-last, node))
        for heap, sign in ((queues.oldest, 1), (queues.newest, -1)):
            if len(heap) > 64 + 2 * len(self._offered):  # mostly stale entries: bounds the memory
                heap[:] = [entry for entry in set(heap) if self._valid(kind, sign * entry[0], entry[1])]
                heapq.heapify(heap)

    def withdraw(self, node: int) -> None:
        self._offered.discard(node)

    def choose(self, most: int) -> Nodes:
        candidates = list[tuple[int, int, int]]()  # last use, node, class
        for kind, queues in list(self._queues.items()):
            oldest, newest = self._front(kind, queues.oldest, 1), self._front(kind, queues.newest, -1)
            if oldest is None or newest is None:  # both: the heaps have the same offered nodes
                del self._queues[kind]
                continue
            candidates.append((*oldest, kind))
            if newest != oldest:
                candidates.append((*newest, kind))
        node = self._chosen = self._victim(candidates)
        self._offered.remove(node)
        return self._runs.tail(node, most)

    def _victim(self, candidates: list[tuple[int, int, int]]) -> int:
        """Returns the node of least worth; the least recently used where the guard's margin forbids that one.

        Args:
            candidates: Last use, node and class of the oldest and the newest offered node of each class.
        """
        least_recent = min(candidates)
        if len(candidates) > 1 and self.guard.margin > 0:
            worth = [self._hazards.worth(kind, self._now - last) for last, _, kind in candidates]
            least, best = min(zip(worth, candidates, strict=True))
            if least < self.guard.margin * worth[candidates.index(least_recent)]:
                return best[1]
        return least_recent[1]

    def _front(self, kind: int, heap: list[Entry], sign: int) -> Entry | None:
        """Drops stale entries in front of a heap: of nodes that were withdrawn, or used again since.

        Args:
            kind: Class of the heap.
            heap: A heap of `Queues`.
            sign: Sign of the times in it.

        Returns:
            The first entry with its time positive; None where the heap is empty now.
        """
        while heap:
            last, node = heap[0]
            if self._valid(kind, sign * last, node):
                return sign * last, node
            heapq.heappop(heap)
        return None

    def _rank(self, node: int) -> tuple[int, int]:
        """Returns a node's class, and the time when its last request left; -1 for none."""
        run = self._runs.run_of(node)
        return (0, -1) if run is None else (run.kind, run.last)

    def _valid(self, kind: int, last: int, node: int) -> bool:
        """Whether an entry of a heap still describes an offered node."""
        return node in self._offered and self._rank(node) == (kind, last)

    def evicted(self, nodes: Nodes, hashes: Sequence[BlockHash]) -> None:
        chosen, self._chosen = self._chosen == nodes[0], -1
        for stretch in self._runs.take_out(nodes):
            if stretch.run is None:  # removed before any request has left it: nothing was learned of it
                continue
            ghosts = list(hashes[stretch.start : stretch.end])
            ghosts.reverse()
            forgotten = self._ghosts.remember(ghosts, stretch.run.kind, stretch.run.last)
            self._hazards.close(forgotten, hit=False)
            if stretch.run.evicted:  # evicted before, and removed before a request has left it again
                continue
            if chosen:
                self.guard.evicted(len(stretch))
            else:
                self.guard.removed(stretch.run.last, len(stretch))


def _requests(run: Run | None) -> int:
    """Returns the number of requests that have left the nodes of a run, up to `USES`."""
    return 0 if run is None else run.kind // KINDS + 1


def _levels(stretches: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Computes the levels of use of nodes, once one more request has left.

    Args:
        stretches: Runs of the nodes until now.

    Returns:
        Level, 0 .. USES - 1, and end, of each stretch of nodes with the same level.
    """
    levels = list[tuple[int, int]]()
    for stretch in stretches:
        level = min(_requests(stretch.run), USES - 1)
        if levels and levels[-1][0] == level:
            levels.pop()
        levels.append((level, stretch.end))
    return levels


class Hazards:
    """Learns the probability of another request by class and age, and derives the worth of a page.

    A page is open from one use until the next, or until its ghost is forgotten. Then it is closed, with or without a
    hit.

    Writes its arrays alone: hits and closed observations [classes, age bins], open pages [epochs, classes] and, from
    these, hazards [classes, age bins].

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
        self._open = np.zeros((EPOCHS, CLASSES))  # a ring, by epoch of birth
        self._now = self._requests = self._epoch = self._learnt = 0
        # Computed on demand, until hazards are learned anew: few classes and ages have evictable pages.
        self._sums: dict[int, Sums] = {}
        self._worth: dict[tuple[int, int], float] = {}
        self._learn()

    def worth(self, kind: int, age: int) -> float:
        """Returns the worth of a page: expected hits for each unit of time that it occupies memory.

        Args:
            kind: Class.
            age: Pages used since its last request left.
        """
        place = kind, self.age_bin(age)
        worth = self._worth.get(place)
        if worth is None:
            if kind not in self._sums:
                self._sums[kind] = hazard_sums(self._hazard[kind], self._widths)
            worth = self._worth[place] = gittins_index(self._sums[kind], place[1])
        return worth

    def age_bin(self, age: int) -> int:
        """Returns the age bin of an age in pages used."""
        # Bins are half octaves: floor(2 log2(age)) is the bit length of age squared, less 1, without rounding errors.
        return min((age * age).bit_length() - 1, self.bins - 1) if age > 0 else 0

    def advance(self, now: int) -> None:
        """Advances time after one more request has left: closes old pages, fades observations, learns when due."""
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
        # Once a capacity of pages used; more often at the start, where estimates rest on little.
        if now - self._learnt >= min(self._learn_every, self._learnt / 4):
            self._learn()

    def open(self, kind: int, pages: int) -> None:
        """Opens a number of pages of a class, from now on."""
        self._open[self._epoch % EPOCHS, kind] += pages

    def close(self, pages: Mapping[tuple[int, int], int], hit: bool) -> None:
        """Closes pages.

        Args:
            pages: Their number by birth and class.
            hit: Whether they were requested again; else they were forgotten.
        """
        for (birth, kind), count in sorted(pages.items()):
            epoch = birth // self._quantum
            if self._epoch - epoch < EPOCHS:  # older ones were closed when they fell off the ring
                age = self.age_bin(self._now - birth)
                self._open[epoch % EPOCHS, kind] -= count
                self._closed[kind, age] += count
                self._hits[kind, age] += count * hit

    def _learn(self) -> None:
        """Estimates the hazards from hits and exposed pages, shrunk in four steps.

        1. Overall hazard by age, shrunk towards `PRIOR`.
        2. Level of each use, a factor on the overall hazard, shrunk towards 1.
        3. Hazard by use and age, shrunk towards the product of these.
        4. Level of each class, a factor on the hazard of its use, shrunk towards 1.
        """
        self._learnt = self._now
        exposed = self._exposed()
        # Pages a request: weights in these units do not depend on the length of requests.
        mean = max(1.0, self._now / max(1, self._requests))
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
        """Returns [classes, age bins] the pages that have reached each age bin.

        Open pages within a bin count half: they have seen half of it on average.
        """
        epochs = self._epoch - np.arange(min(EPOCHS, self._epoch + 1))
        ages = np.maximum(self._now - epochs * self._quantum, 1)
        bins = np.minimum((np.log2(ages) * BINS_AN_OCTAVE).astype(int), self.bins - 1)
        # Ages ascend, so a bin's epochs stand together.
        starts = np.concatenate(([0], (bins[1:] != bins[:-1]).nonzero()[0] + 1))
        waiting = np.zeros_like(self._closed)
        waiting[:, bins[starts]] = np.add.reduceat(self._open.take(epochs % EPOCHS, axis=0), starts).T
        reached = np.cumsum((self._closed + waiting)[:, ::-1], axis=1)[:, ::-1]
        return reached - 0.5 * waiting


def hazard_sums(hazard: NDArray[np.float64], widths: NDArray[np.float64]) -> Sums:
    """Sums expected hits and expected time from the beginning of each age bin on, as seen from the first bin.

    Args:
        hazard: [bins] float64. Probability of a hit in a bin once its age is reached.
        widths: [bins] float64. Widths of the bins, in pages used.

    Returns:
        [bins + 1] expected hits and [bins + 1] expected time in pages used; 0 after the last bin.
    """
    missed = 1 - hazard
    alive = missed.cumprod() / missed  # probability to reach the beginning of each bin
    # Sums from the end: great ages, which few pages reach, would be lost in a difference of sums from the front.
    hits = (alive * hazard)[::-1].cumsum()[::-1]
    time = (alive * (widths * (1 - hazard / 2)))[::-1].cumsum()[::-1]
    return [*hits.tolist(), 0.0], [*time.tolist(), 0.0]


def gittins_index(sums: Sums, start: int) -> float:
    """Returns the Gittins index: the best ratio, over all horizons, of expected hits to expected time.

    A page is kept until its hit or until the horizon. The unit is hits for each page used.

    Args:
        sums: As `hazard_sums` returns them.
        start: Age bin at whose beginning the page is.
    """
    hits, time = sums
    here, now = hits[start], time[start]
    return max((here - after) / (now - then) for after, then in zip(hits[start + 1 :], time[start + 1 :], strict=True))
