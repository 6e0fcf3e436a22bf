"""Blueprint of a scheduler: all that its plans depend on beside events, results and times.

An engine and the replay of its recording make their schedulers here, so they cannot be made in different ways. The
secret of the block hashes is no part of it: plans depend on which hashes are equal, not on their values.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cache_manager.block_hash import BlockHasher
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.states import RecurrentLayer
from cache_manager.tier import HostTier
from scheduler.drafts import Drafter, PromptLookup
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings


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
        return Blueprint(
            SchedulerSettings(**values["settings"]),
            QueueLimits(**values["queue"]),
            KVLayout(groups, *sizes, recurrent),
            values["pages"],
            values["eviction"],
            values["host_slots"],
            values["prefix_cache"],
            values["holds"],
        )
