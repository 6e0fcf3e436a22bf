"""Interpolated Kneser-Ney n-gram model: the plain baseline that the demo model's loss is stated beside.

After Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1999 (one discount).
"""

import math
from collections import Counter, defaultdict


class KneserNey:
    """Counts token ids up to `order`; `loss(tokens)` is the mean negative log probability in nats a token."""

    def __init__(self, tokens: list[int], vocabulary: int, order: int = 3, discount: float = 0.75) -> None:
        self.vocabulary, self.order, self.discount = vocabulary, order, discount
        self.counts: list[Counter] = []
        grams = Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
        for _ in range(order):
            self.counts.insert(0, grams)
            grams = Counter(gram[1:] for gram in grams)  # continuation counts: in how many contexts a gram was seen
        self.totals: list[dict] = []
        self.kinds: list[dict] = []
        for grams in self.counts:
            total: dict[tuple, int] = defaultdict(int)
            kinds: dict[tuple, int] = defaultdict(int)
            for gram, count in grams.items():
                total[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self.totals.append(total)
            self.kinds.append(kinds)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        p = 1.0 / self.vocabulary
        for n in range(self.order):
            before = context[len(context) - n :] if n else ()
            total = self.totals[n].get(before)
            if not total:
                break
            seen = self.counts[n].get((*before, token), 0)
            p = (max(seen - self.discount, 0.0) + self.discount * self.kinds[n][before] * p) / total
        return p

    def loss(self, tokens: list[int]) -> float:
        reach = self.order - 1
        logs = [-math.log(self.probability(tuple(tokens[i - reach : i]), tokens[i])) for i in range(reach, len(tokens))]
        return sum(logs) / len(logs)
