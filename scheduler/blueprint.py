"""Blueprint of a scheduler: all that its plans depend on beside events, results and times.

An engine and the replay of its recording make their schedulers here, so they cannot be made in different ways. The
secret of the block hashes is no part of it: plans depend on which hashes are equal, not on their values.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from cache_manager.block_hash import BlockHasher
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.states import RecurrentLayer
from cache_manager.tier import HostTier
from scheduler.drafts import Drafter, PromptLookup
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings

T = TypeVar("T", SchedulerSettings, QueueLimits)

MOST_PAGES, MOST_VALUE = 2**31, 2**31  # beyond which nothing in a file is meant


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Parts of a scheduler.

    Attributes:
        settings: Composition of steps.
        queue: Bounds of the waiting queue.
        layout: Shape of the KV cache.
        pages: Pages of the pool.
        eviction: Name of the eviction policy.
        host_slots: Page slots of the host tier; 0 without one.
        prefix_cache: Whether pages are hashed and shared.
        holds: As in `Scheduler`.
    """

    settings: SchedulerSettings
    queue: QueueLimits
    layout: KVLayout
    pages: int
    eviction: str
    host_slots: int = 0
    prefix_cache: bool = True
    holds: bool = False

    def cache(self) -> CacheManager:
        """Returns a new cache manager."""
        tier = HostTier(self.host_slots, self.layout.tables) if self.host_slots else None
        rows, ahead = self.settings.max_sequences, self.settings.ahead
        return CacheManager(self.layout, self.pages, rows, POLICIES[self.eviction], ahead, tier)

    def drafter(self) -> Drafter | None:
        """Returns the drafter, None where the settings want no draft tokens."""
        return PromptLookup() if self.settings.draft_tokens else None

    def scheduler(self, cache: CacheManager, hasher: BlockHasher | None) -> Scheduler:
        """Returns a new scheduler.

        Args:
            cache: Its pages.
            hasher: Hashes them; None without a prefix cache.
        """
        return Scheduler(self.settings, self.queue, cache, hasher, self.drafter(), holds=self.holds)

    def to_json(self) -> dict[str, Any]:
        """Returns an object for `json`. Unbounded limits are its `Infinity`."""
        layout = self.layout
        shape = {
            "groups": [asdict(group) for group in layout.groups],
            "element_bytes": layout.element_bytes,
            "page_size": layout.page_size,
            "scale_bytes": layout.scale_bytes,
            "recurrent": [asdict(layer) for layer in layout.recurrent],
        }
        return {
            "settings": asdict(self.settings),
            "queue": asdict(self.queue),
            "layout": shape,
            "pages": self.pages,
            "eviction": self.eviction,
            "host_slots": self.host_slots,
            "prefix_cache": self.prefix_cache,
            "holds": self.holds,
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Blueprint":
        """Returns the blueprint of `to_json`. Raises KeyError, TypeError or ValueError for another object."""
        shape = values["layout"]
        groups = tuple(
            LayerGroup(tuple(one["layers"]), KVShape(**one["shape"]), one["window"], one["chunked"])
            for one in shape["groups"]
        )
        recurrent = tuple(RecurrentLayer(one["layer"], tuple(one["units"])) for one in shape["recurrent"])
        sizes = shape["element_bytes"], shape["page_size"], shape["scale_bytes"]
        for name, least in (("pages", 1), ("host_slots", 0)):
            if type(values[name]) is not int or not least <= values[name] <= MOST_PAGES:
                raise ValueError(f"{name} is {values[name]!r:.30}, must be a number in [{least}, {MOST_PAGES}]")
        for size in sizes:
            if type(size) is not int or size < 0:
                raise ValueError(f"layout has the size {size!r:.30}, must be a number of bytes or tokens")
        if values["eviction"] not in POLICIES:
            raise ValueError(f"eviction is {values['eviction']!r:.30}, must be one of {', '.join(POLICIES)}")
        made = Blueprint(
            _checked(SchedulerSettings, values["settings"]),
            _checked(QueueLimits, values["queue"]),
            KVLayout(groups, *sizes, recurrent),
            values["pages"],
            values["eviction"],
            values["host_slots"],
            values["prefix_cache"],
            values["holds"],
        )
        if not isinstance(made.prefix_cache, bool) or not isinstance(made.holds, bool):
            raise ValueError("prefix_cache and holds must be true or false")
        return made


def _checked(kind: type[T], values: Mapping[str, Any]) -> T:
    """Makes settings of values whose types are checked, as a file may have any. Raises TypeError or ValueError."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        kinds: tuple[Any, ...] = get_args(hints.get(name)) or (hints.get(name),)
        allowed: tuple[Any, ...] = (*kinds, int) if float in kinds else kinds
        if type(value) not in allowed:
            raise ValueError(f"{name} is {value!r:.30}, which no {kind.__name__} has")
        if isinstance(value, int | float) and not -MOST_VALUE <= value <= MOST_VALUE and value != math.inf:
            raise ValueError(f"{name} is {value!r:.30}, must be a number up to {MOST_VALUE}")
    return kind(**values)
