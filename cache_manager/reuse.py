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
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import Name

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
WEAK = 0.1  # requests' worth of pages by which a class's level is drawn towards 1


class ReuseAware:
    """See above. pages: of the pool."""

    name = "reuse"

    def __init__(self, pages: int) -> None:
        self._capacity = pages
        self._now = 0
        self._uses = np.zeros(64, np.int32)  # by node: requests that have left
        self._class = np.zeros(64, np.int32)
        self._last = np.full(64, -1, np.int64)  # when the last one left; -1 for none
        self._offered: set[int] = set()
        self._oldest: list[list[tuple[int, int]]] = [[] for _ in range(CLASSES)]
        self._newest: list[list[tuple[int, int]]] = [[] for _ in range(CLASSES)]
        self._ghosts: tuple[dict[Name, int], dict[Name, int]] = ({}, {})
        self._hazards = Hazards(pages)

    def __len__(self) -> int:
        return len(self._offered)

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:
        self._widen(max(nodes) + 1)
        index = np.array(nodes)
        self._last[index], self._uses[index] = -1, 0
        for ghosts in self._ghosts:
            if ghosts.keys().isdisjoint(names):
                continue
            for node, name in zip(nodes, names, strict=True):
                ghost = ghosts.pop(name, None)
                if ghost is not None:
                    self._last[node], self._class[node] = divmod(ghost, CLASSES)
                    self._uses[node] = self._class[node] // KINDS + 1

    def _widen(self, nodes: int) -> None:
        more = max(nodes, 2 * len(self._uses)) - len(self._uses)
        if nodes > len(self._uses):
            self._uses, self._class = np.pad(self._uses, (0, more)), np.pad(self._class, (0, more))
            self._last = np.pad(self._last, (0, more), constant_values=-1)

    def released(self, nodes: NDArray[np.int32]) -> None:
        self._now += len(nodes)
        self._hazards.advance(self._now)
        seen = nodes[self._last[nodes] >= 0]
        self._hazards.close(self._class[seen], self._last[seen], hit=True)
        new = np.count_nonzero(self._uses[nodes] == 0) / len(nodes)
        self._uses[nodes] += 1
        level = np.minimum(self._uses[nodes], USES) - 1
        self._class[nodes] = level * KINDS + 1 + min(3, int(4 * new))
        self._class[nodes[-1]] = level[-1] * KINDS
        self._last[nodes] = self._now
        self._hazards.open(self._class[nodes])

    def offer(self, node: int) -> None:
        kind, last = int(self._class[node]), int(self._last[node])
        self._offered.add(node)
        heapq.heappush(self._oldest[kind], (last, node))
        heapq.heappush(self._newest[kind], (-last, node))
        for heaps, sign in ((self._oldest, 1), (self._newest, -1)):
            if len(heaps[kind]) > 64 + 2 * len(self._offered):
                heaps[kind] = [entry for entry in set(heaps[kind]) if self._valid(kind, sign * entry[0], entry[1])]
                heapq.heapify(heaps[kind])

    def withdraw(self, node: int) -> None:
        self._offered.discard(node)

    def choose(self) -> int:
        worth = self._hazards.worth
        best = (float("inf"), 0, -1)
        for kind in range(CLASSES):
            if not self._oldest[kind]:
                continue
            for heap, sign in ((self._oldest[kind], 1), (self._newest[kind], -1)):
                while heap and not self._valid(kind, sign * heap[0][0], heap[0][1]):
                    heapq.heappop(heap)
                if heap:
                    last = sign * heap[0][0]
                    best = min(best, (worth[kind][self._hazards.age_bin(self._now - last)], last, heap[0][1]))
        self._offered.remove(best[2])
        return best[2]

    def _valid(self, kind: int, last: int, node: int) -> bool:
        return node in self._offered and bool(self._class[node] == kind) and bool(self._last[node] == last)

    def going(self, run: Sequence[int]) -> int:
        """Pages of one class that were used together have one worth."""
        nodes = np.array(run)
        same = (self._class[nodes] == self._class[nodes[0]]) & (self._last[nodes] == self._last[nodes[0]])
        return len(run) if same.all() else int(same.argmin())

    def evicted(self, run: Sequence[int], names: Sequence[Name]) -> None:
        nodes = np.array(run)
        young, used = self._ghosts[0], self._last[nodes] >= 0
        young.update(zip(names, (self._last[nodes] * CLASSES + self._class[nodes]).tolist(), strict=True))
        for i in np.flatnonzero(~used).tolist():  # forgotten before any request has left them
            del young[names[i]]
        if len(young) >= GHOSTS * self._capacity:
            forgotten = np.fromiter(self._ghosts[1].values(), np.int64)
            self._hazards.close(forgotten % CLASSES, forgotten // CLASSES, hit=False)
            self._ghosts = ({}, young)


class Hazards:
    """How likely a page of each class is asked for again at each age, and what that makes it worth.

    worth: [classes][age bins] lists. Pages are open from one use to the next, or until they are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._quantum = max(1, capacity // QUANTA)
        self._learn_every = capacity
        self._bins = int(np.log2(self._quantum * EPOCHS) * BINS_AN_OCTAVE) + 4
        edges = 2.0 ** (np.arange(self._bins + 1) / BINS_AN_OCTAVE)
        edges[0] = 0
        self._widths = np.diff(edges)
        self._hits = np.zeros((CLASSES, self._bins))
        self._closed = np.zeros((CLASSES, self._bins))
        self._open = np.zeros((CLASSES, EPOCHS))  # by epoch of their birth, a ring
        self._now = self._requests = self._epoch = self._learnt = 0
        self._learn()

    def age_bin(self, age: int) -> int:
        """Of half octaves: 2 log2 of the age, without rounding errors."""
        return min((age * age).bit_length() - 1, self._bins - 1) if age > 0 else 0

    def advance(self, now: int) -> None:
        """One more request has left."""
        self._now, self._requests = now, self._requests + 1
        epoch = now // self._quantum
        for e in range(self._epoch + 1, min(epoch, self._epoch + EPOCHS) + 1):
            self._closed[:, -1] += self._open[:, e % EPOCHS]  # too old: closed without a hit
            self._open[:, e % EPOCHS] = 0
        if epoch > self._epoch:
            fade = np.exp(-(epoch - self._epoch) / (MEMORY * QUANTA))
            self._hits *= fade
            self._closed *= fade
            self._epoch = epoch
        if now - self._learnt >= min(self._learn_every, self._learnt / 4):
            self._learn()

    def open(self, classes: NDArray[np.int32]) -> None:
        """Pages of these classes are waited for from now on."""
        self._open[:, self._epoch % EPOCHS] += np.bincount(classes, minlength=CLASSES)

    def close(self, classes: NDArray, births: NDArray[np.int64], hit: bool) -> None:
        """They were asked for again, or are not waited for any more."""
        alike, pages = np.unique(births * CLASSES + classes, return_counts=True)  # pages come in runs: few differ
        for (birth, kind), n in zip(map(divmod, alike.tolist(), repeat(CLASSES)), pages.tolist(), strict=True):
            epoch = birth // self._quantum
            if self._epoch - epoch < EPOCHS:  # older ones were closed when they fell off the ring
                age = self.age_bin(self._now - birth)
                self._open[kind, epoch % EPOCHS] -= n
                self._closed[kind, age] += n
                self._hits[kind, age] += n * hit

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
        hazard = np.minimum(0.95, by_use[:, None] * level2[:, :, None]).reshape(CLASSES, -1)
        self.worth = _gittins(hazard, self._widths).tolist()

    def _exposed(self) -> NDArray[np.float64]:
        """[classes, age bins] pages that have come to this age or are in the middle of it."""
        epochs = self._epoch - np.arange(EPOCHS)
        ages = np.maximum(self._now - epochs * self._quantum, 1)
        bins = np.minimum((np.log2(ages) * BINS_AN_OCTAVE).astype(int), self._bins - 1)
        waiting = np.zeros_like(self._closed)
        np.add.at(waiting.T, bins, self._open[:, epochs % EPOCHS].T)
        reached = np.cumsum((self._closed + waiting)[:, ::-1], axis=1)[:, ::-1]
        return reached - 0.5 * waiting


def _gittins(hazard: NDArray[np.float64], widths: NDArray[np.float64]) -> NDArray[np.float64]:
    """[classes, bins] best ratio, over all horizons, of the chance of a hit to the time until it or the horizon.

    hazard: [classes, bins] chance of a hit in a bin once its age is reached. widths: [bins] of the bins.
    """
    alive = np.cumprod(1 - hazard, axis=1) / (1 - hazard)  # at the beginning of a bin, as seen from the first one
    # Sums from the end, so that those of great ages, which few pages reach, are not lost in those of small ones.
    hits, time = (np.cumsum((alive * part)[:, ::-1], axis=1)[:, ::-1] for part in (hazard, widths * (1 - hazard / 2)))
    best = hits / time  # without an end
    for end in range(1, hazard.shape[1]):
        here = (hits[:, :end] - hits[:, end, None]) / (time[:, :end] - time[:, end, None])
        np.maximum(best[:, :end], here, out=best[:, :end])
    return best
