"""Causes of preemptions: the closed list by which they are counted."""

from enum import StrEnum


class PreemptionCause(StrEnum):
    """Cause for which a sequence loses its row."""

    PAGES = "pages"
    """A running sequence needs a page, and none is free."""

    PRIORITY = "priority"
    """A waiting sequence that the policy puts before it lacks rows or pages."""

    SEARCH = "search"
    """It is a hypothesis that waits for others of its beam search, and another sequence needs its row or pages."""

    LOST_COPY = "lost_copy"
    """A page that was to come back from the host tier was not what had been stored."""

    @property
    def counts_to_bound(self) -> bool:
        """Whether it counts to `max_preemptions`: others took the row from work that could have gone on."""
        return self in (PreemptionCause.PAGES, PreemptionCause.PRIORITY)
