"""Made requests for the prefix cache, each of a kind of traffic: lists of block ids, the same each time.

The kinds stand for what real traces mix: long documents with several questions, conversations, popular prompts, and
two that are hard for a policy which learns.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count

Requests = list[list[int]]


def documents(gap: float = 150, requests: int = 4000) -> Requests:
    """Long documents, with questions at exponential gaps of so many requests on average, and short prompts between."""
    draw, ids = random.Random(1), count()
    waiting: list[tuple[float, int, list[int], int]] = []
    made = Requests()
    while len(made) < requests:
        if waiting and (waiting[0][0] <= len(made) or draw.random() < 0.3):
            _, _, document, left = heapq.heappop(waiting)
        elif draw.random() < 0.35:
            made.append([next(ids)])
            continue
        else:
            length = draw.choice([draw.uniform(5, 20), draw.uniform(25, 60), draw.uniform(50, 110)])
            document, left = [next(ids) for _ in range(int(length))], int(draw.expovariate(1 / 4))
        made.append(document + [next(ids) for _ in range(draw.randint(0, 2))])
        if left:
            again = len(made) + draw.expovariate(1 / gap)
            heapq.heappush(waiting, (again, len(made), document, left - 1))
    return made


def shuffled_documents(requests: int = 4000) -> Requests:
    """Long documents whose questions are spread evenly over a third of the trace."""
    draw, ids = random.Random(1), count()
    events = list[tuple[float, list[int]]]()
    while len(events) < 0.65 * requests:
        length = draw.choice([draw.uniform(5, 20), draw.uniform(25, 60), draw.uniform(50, 110)])
        document, start = [next(ids) for _ in range(int(length))], draw.random()
        events += [(start + 0.3 * draw.random(), document) for _ in range(1 + int(draw.expovariate(1 / 4)))]
    events += [(1.3 * draw.random(), []) for _ in range(requests - len(events))]
    events.sort(key=lambda event: event[0])
    return [document + [next(ids) for _ in range(draw.randint(1, 2))] for _, document in events]


def conversations(think: float = 60, requests: int = 6000) -> Requests:
    """Conversations that grow by a turn after about so many other requests, out of one common beginning."""
    draw, ids = random.Random(1), count()
    common = [next(ids) for _ in range(3)]
    waiting: list[tuple[float, int, list[int], int]] = []
    made = Requests()
    while len(made) < requests:
        if waiting and waiting[0][0] <= len(made):
            _, _, prompt, left = heapq.heappop(waiting)
        else:
            prompt, left = common, int(draw.expovariate(1 / 4))
        prompt = prompt + [next(ids) for _ in range(1 + int(draw.expovariate(1 / 5)))]
        made.append(prompt)
        if left:
            again = len(made) + 1 + draw.lognormvariate(0, 1) * think
            heapq.heappush(waiting, (again, len(made), prompt, left - 1))
    return made


def popular(requests: int = 6000) -> Requests:
    """3,000 prompts whose popularity falls with their rank."""
    draw, weights = random.Random(1), [(i + 1) ** -0.6 for i in range(3000)]
    return [[1000 * i + j for j in range(1 + i * 7919 % 16)] for i in draw.choices(range(3000), weights, k=requests)]


def recent(depth: float = 100, requests: int = 6000) -> Requests:
    """Prompts drawn by how recently they came: nothing beats least recently used here."""
    draw, stack, made = random.Random(1), list[int](), Requests()
    for i in range(requests):
        place = int(draw.expovariate(1 / depth))
        prompt = stack.pop(place) if place < len(stack) and draw.random() < 0.7 else i
        stack.insert(0, prompt)
        made.append([1000 * prompt + j for j in range(1 + prompt * 31 % 20)])
    return made


def phases(requests: int = 8000) -> Requests:
    """By turns a loop over 150 prompts and `recent`, 1,000 requests each: what was learned turns out wrong."""
    loop = [[-10 * (i % 150) - j - 1 for j in range(10)] for i in range(requests)]
    stack = recent(20, requests)
    return [(stack if i // 1000 % 2 else loop)[i] for i in range(requests)]


MADE: dict[str, Callable[[], Requests]] = {
    "documents": documents,
    "documents-rare": lambda: documents(600),
    "documents-shuffled": shuffled_documents,
    "conversations": conversations,
    "conversations-slow": lambda: conversations(300),
    "popular": popular,
    "recent": recent,
    "phases": phases,
}
