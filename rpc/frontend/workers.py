"""Threads that prepare requests beside the event loop: templates, tokenization, images."""

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import TypeVar

from rpc.frontend.quota import Quota
from rpc.frontend.turns import TurnExecutor
from scheduler.prompts import Chat
from scheduler.spec import Spec

T = TypeVar("T")


class PromptKind(Enum):
    """Kind of a request's prompt.

    Each kind has threads of its own, so that text waits neither for templates, which can take a second, nor for images
    or the grammars of structured output.
    """

    TEXT = "text"
    CHAT = "chat"
    IMAGES = "images"
    GRAMMAR = "grammar"


def kind_of(spec: Spec, knows_grammar: bool = True) -> PromptKind:
    """Returns the slowest kind that a prompt belongs to: a chat with images counts as images.

    Args:
        spec: The request.
        knows_grammar: Whether a constraint on its output need not be checked any more.
    """
    if not knows_grammar:
        return PromptKind.GRAMMAR
    if spec.images:
        return PromptKind.IMAGES
    return PromptKind.CHAT if isinstance(spec.prompt, Chat) else PromptKind.TEXT


class PrepareWorkers:
    """Runs tasks in threads, in turns between tenants, with a bound on how many run or wait.

    Args:
        threads: Count of threads for each kind of prompt.
        places: Count of tasks that run or wait, of all kinds. No tenant of several has more than half. Those with
            grammars, which wait for one process, have half at most.
    """

    def __init__(self, threads: int, places: int) -> None:
        self._executors = {kind: TurnExecutor(threads, f"quire-prepare-{kind.value}") for kind in PromptKind}
        self._places = Quota(places, "requests are being tokenized")
        self._grammars = Quota(max(1, places // 2), "constraints are being checked")

    async def run(self, task: Callable[[], T], kind: PromptKind, tenant: str) -> T:
        """Runs a task in a thread of its kind, and returns its result.

        Raises:
            RequestFailed: No place is left for the tenant.
            Exception: Any exception of `task`.
        """
        of_kind = self._grammars.held(tenant) if kind is PromptKind.GRAMMAR else nullcontext()
        with self._places.held(tenant), of_kind:
            return await self._executors[kind].run(task, tenant)

    def shutdown(self) -> None:
        """Cancels the tasks that wait, and does not wait for those that run."""
        for executor in self._executors.values():
            executor.shutdown()
