"""A random traffic for the world: what a scheduler may do, in any order, chosen by a seeded generator."""

from random import Random

from cache_manager.block_hash import ImageSpan, Scope
from tests.cache_manager.driver import CacheDriver

PAGE_SIZES = (1, 2, 7, 16)


def scopes(page_size: int) -> tuple[Scope, ...]:
    """Few, so that requests meet: tenants, salts, public prefixes, spans that hit whole, images."""
    two = 2 * page_size
    return (
        Scope(),
        Scope(),
        Scope(tenant="other"),
        Scope(salt="salt"),
        Scope(public=two),
        Scope(tenant="other", public=two),
        Scope(tenant="other", public=two, salt="salt"),
        Scope(bidirectional=page_size + 1),
        Scope(images=(ImageSpan(0, page_size + 1, b"cat"),)),
        Scope(images=(ImageSpan(0, page_size + 1, b"dog"),)),
        Scope(images=(ImageSpan(1, 3, b"cat"),), bidirectional=page_size + 1),
        Scope(images=(ImageSpan(1, 3, b"dog"),), bidirectional=page_size + 1),
    )


def prompt(rng: Random, page_size: int, pages: int) -> list[int]:
    """Two tokens, rarely the second: most prompts have a prefix in common with some others."""
    length = rng.randrange(1, pages * page_size + 2)
    return [int(rng.random() < 0.5 / page_size) for _ in range(length)]


class Player:
    """Does one random thing to a world at a time. trouble: also faults, resets and pages that are set aside."""

    def __init__(self, world: CacheDriver, rng: Random, pages_a_prompt: int = 4, trouble: bool = True) -> None:
        self.world, self.rng, self._pages = world, rng, pages_a_prompt
        self._scopes = scopes(world.size)
        moves = {
            self.admit: 10,
            self.launch: 10,
            self.commit: 10,
            self.fork: 2,
            self.finish: 3,
            self.preempt: 1,
            self.grow_ahead: 1,
            self.grow_all: 2,
            self.shrink_cache: 0.1,
        }
        if trouble:
            moves |= {self.fault: 0.3, self.distrust: 0.1, self.reset: 0.05, self.quarantine: 0.06}
        self._moves = list(moves)
        self._until = [sum(list(moves.values())[: i + 1]) for i in range(len(moves))]

    def move(self) -> None:
        """Something that asks the manager."""
        while not self.rng.choices(self._moves, cum_weights=self._until)[0]():
            pass

    def _row(self) -> int | None:
        running = self.world.running()
        return self.rng.choice(running) if running else None

    def admit(self) -> bool:
        world, rng = self.world, self.rng
        if not world.queue or (len(world.queue) < 3 and rng.random() < 0.5):
            self._submit()
        story = rng.choice(world.queue)
        if None not in world.rows:
            return False
        if not world.admit(story, wait=rng.random() < 0.7, everything=rng.random() < 0.8) and not world.running():
            world.queue.remove(story)  # too long for the pool
        return True

    def _submit(self) -> None:
        world, rng = self.world, self.rng
        scope = rng.choice(self._scopes)
        tokens = prompt(rng, world.size, self._pages)
        tokens += [0] * (scope.bidirectional + 1 - len(tokens))
        goal = len(tokens) + rng.randrange(1, 2 * world.size + 2)
        world.submit(tokens, scope, goal, named=rng.random() < 0.95)

    def launch(self) -> bool:
        world, rng, work = self.world, self.rng, []
        for row in world.running():
            need = world.need(row)
            if need > 0 and rng.random() < 0.8:
                work.append((row, need if rng.random() < 0.5 else rng.randrange(1, need + 1)))
        return bool(work) and world.launch(work, draw=int(rng.random() < 0.5 / world.size))

    def commit(self) -> bool:
        return self.world.commit(publish=self.rng.random() < 0.95)

    def fork(self) -> bool:
        row = self._row()
        return row is not None and self.world.fork(row, draws=self.rng.randrange(2))

    def finish(self) -> bool:
        return self._leave(again=False)

    def preempt(self) -> bool:
        return len(self.world.queue) < 4 and self._leave(again=True)

    def _leave(self, again: bool) -> bool:
        row = self._row()
        if row is None:
            return False
        self.world.release(row, again)
        return True

    def grow_ahead(self) -> bool:
        row = self._row()
        if row is not None:
            self.world.grow(row, self.world.story(row).scheduled + self.rng.randrange(3 * self.world.size))
        return row is not None

    def grow_all(self) -> bool:
        world, rng = self.world, self.rng
        rows = world.lacking() if rng.random() < 0.7 else world.running()
        ends = [world.story(row).scheduled + rng.randrange(1, world.size + 1) for row in rows]
        if rows and world.lack_a_page(rows, ends):
            world.grow_by_page(rows)
        return bool(rows)

    def shrink_cache(self) -> bool:
        self.world.shrink_cache(self.rng.randrange(self.world.manager.pool.total))
        return True

    def fault(self) -> bool:
        flight = self.world.flight
        return bool(flight and flight[0].work) and self.world.commit(fault=self.rng.randrange(len(flight[0].work)))

    def distrust(self) -> bool:
        row = self._row()
        if row is None:
            return False
        self.world.distrust(row)
        return True

    def reset(self) -> bool:
        self.world.reset()
        return True

    def quarantine(self) -> bool:
        world = self.world
        page = self.rng.randrange(world.manager.pool.total)
        if len(world.suspects) >= world.manager.pool.total // 4:
            return False
        world.quarantine([page])
        return True
