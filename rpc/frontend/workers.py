"""Threads that prepare requests beside the event loop: templates, tokenization, images."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

from rpc.frontend.quota import Quota
from scheduler.request import Chat, Spec

T = TypeVar("T")


class PromptKind(Enum):
    """Kind of a request's prompt. Each has threads of its own, so that text waits neither for templates, which can take
    a second, nor for images.
    """

    TEXT = "text"
    CHAT = "chat"
    IMAGES = "images"


def kind_of(spec: Spec) -> PromptKind:
    """Returns the kind that takes longest to prepare: an image in a chat counts as an image."""
    if spec.images:
        return PromptKind.IMAGES
    return PromptKind.CHAT if isinstance(spec.prompt, Chat) else PromptKind.TEXT


class PrepareWorkers:
    """Runs tasks in threads, with a bound on how many run or wait.

    Args:
        threads: Of each kind of prompt.
        places: Tasks at once, of all kinds; of several tenants none has more than half.
    """

    def __init__(self, threads: int, places: int) -> None:
        self._executors = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=f"quire-prepare-{kind.value}") for kind in PromptKind
        }
        self._places = Quota(places, "requests are being tokenized")

    async def run(self, task: Callable[[], T], kind: PromptKind, tenant: str) -> T:
        """Returns what `task` does.

        Raises:
            RequestFailed: No place is left for the tenant.
            Exception: What `task` raises.
        """
        with self._places.held(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._executors[kind], task)

    def shutdown(self) -> None:
        """Cancels the tasks that wait, without a wait for those that run."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
