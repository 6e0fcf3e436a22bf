"""Settings of an engine that a simulation changes."""

import re
from dataclasses import dataclass, field, replace

from cache_manager.settings import CacheSettings
from scheduler.blueprint import Blueprint
from scheduler.settings import SCHEDULING_POLICIES

PARTS = re.compile(r"([+-])([0-9]+(?:\.[0-9]+)?)%")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed settings; None leaves one as it was."""

    policy: str | None = field(default=None, metadata={"help": "Another scheduling policy."})
    pages: str | None = field(default=None, metadata={"help": "Number of KV pages, or a part more or less, as +50%."})
    eviction: str | None = field(
        default=None, metadata={"flag": "--eviction-policy", "help": "Another eviction policy."}
    )
    max_batched_tokens: int | None = field(default=None, metadata={"help": "Another token budget of a step."})
    max_sequences: int | None = field(default=None, metadata={"help": "Another number of running sequences."})
    target_itl: float | None = field(
        default=None, metadata={"help": "Seconds that a step with decodes should take at most."}
    )

    @property
    def any(self) -> bool:
        """Whether one is changed."""
        return self != Changes()

    def of(self, blueprint: Blueprint) -> Blueprint:
        """Returns a blueprint with the changes.

        Raises:
            ValueError: A setting is not valid.
        """
        if self.policy is not None and self.policy not in SCHEDULING_POLICIES:
            raise ValueError(f"--policy is {self.policy!r}, must be one of {', '.join(SCHEDULING_POLICIES)}")
        names = ("policy", "max_batched_tokens", "max_sequences", "target_itl")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        eviction = blueprint.eviction if self.eviction is None else CacheSettings(eviction=self.eviction).eviction
        settings = replace(blueprint.settings, **given)
        return replace(blueprint, settings=settings, eviction=eviction, pages=self._pages(blueprint.pages))

    def _pages(self, before: int) -> int:
        if self.pages is None:
            return before
        if part := PARTS.fullmatch(self.pages):
            pages = round(before * (1 + float(part[1] + part[2]) / 100))
        elif self.pages.isdecimal():
            pages = int(self.pages)
        else:
            raise ValueError(f"--pages is {self.pages!r}, must be a number of pages, or a part such as +50% or -20%")
        if pages < 1:
            raise ValueError(f"--pages is {self.pages!r}, which leaves {pages} pages of {before}")
        return pages
