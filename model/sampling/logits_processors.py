"""Logits processors of a user's own: what one is, how it is found, and what happens when it fails.

A processor belongs to one sequence. It sees that sequence's tokens and changes the logits of its next draw, after the
request's own controls and before temperature. The interface is row by row, as vLLM's first one was: a mistake in one
sequence's processor ends that request and touches no other.
"""

import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import RequestFault

ENTRY_POINTS = "quire.logits_processors"
MOST_SECONDS = 1.0  # of one call; the other sequences of the step wait for it

T = TypeVar("T")

log = logging.getLogger("quire.sampling")


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence.

    It must be pure: what it returns depends on the prompt and the drawn tokens alone. A sequence that is preempted, or
    moved to another engine, gets a new processor, which is told all tokens that were drawn before.
    """

    def drew(self, token: int) -> None:
        """Takes note of the next output token."""

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """Changes the logits of a draw. May be called several times for one draw.

        Args:
            logits: [vocabulary] float32, on the model's device. May be changed in place.
            position: Of the drawn token in the output, from 0.

        Returns:
            [vocabulary] float32. A token at -inf is not drawn.
        """


LogitsProcessorFactory = Callable[[NDArray[np.int32]], LogitsProcessor | None]
"""Makes the processor of a sequence from its prompt, int32 [tokens]; None leaves the sequence alone."""


def load_factories(names: str | None) -> list[LogitsProcessorFactory]:
    """Finds factories among the entry points `quire.logits_processors` of installed distributions.

    Args:
        names: Separated by commas; they apply in this order. None for none.

    Raises:
        ValueError: A name has no entry point, or its entry point cannot be imported or called.
    """
    asked = [part.strip() for part in (names or "").split(",") if part.strip()]
    if not asked:
        return []  # reading the metadata of all distributions takes a part of an engine's start
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    factories: list[LogitsProcessorFactory] = []
    for name in asked:
        if name not in found:
            known = ", ".join(sorted(found)) or "no installed distribution has one"
            raise ValueError(f"--logits-processors: {name!r} is no entry point of {ENTRY_POINTS}; known: {known}")
        try:
            factory = found[name].load()
        except Exception as error:  # an import runs the plugin's own code
            raise ValueError(f"--logits-processors: {name!r} cannot be imported: {error}") from error
        if not callable(factory):
            raise ValueError(f"--logits-processors: {name!r} is a {type(factory).__name__}, must be callable")
        factories.append(factory)
    return factories


class RowProcessors:
    """The processors of one sequence, in their order.

    After a failure none of them is called again: `apply` raises the same fault until the request has ended.
    """

    def __init__(
        self, factories: Sequence[LogitsProcessorFactory], prompt: NDArray[np.int32], output: NDArray[np.int32]
    ) -> None:
        """Makes them, and tells them the output so far."""
        self._processors: list[tuple[str, LogitsProcessor]] = []
        self._fault: RequestFault | None = None
        for factory in factories:
            name = getattr(factory, "__qualname__", type(factory).__name__)
            processor = self._guarded(name, factory, prompt.copy())
            if processor is not None:
                self._processors.append((name, processor))
        for token in output.tolist() if self._processors else ():
            self.drew(token)

    def __bool__(self) -> bool:
        """Whether `apply` has anything to do."""
        return bool(self._processors) or self._fault is not None

    def drew(self, token: int) -> None:
        for name, processor in self._processors:
            self._guarded(name, processor.drew, token)

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """Applies each to what the one before returned. logits: [vocabulary], which it may change.

        Raises:
            RequestFault: A processor raised, took too long, or returned something else than logits.
        """
        for name, processor in self._processors:
            made = self._guarded(name, processor.apply, logits, position)
            if self._fault is not None:
                break
            self._fault = _fault_of(name, made, logits.shape)
            if self._fault is not None or made is None:
                break
            logits = made.to(torch.float32)
        if self._fault is not None:
            raise self._fault
        return logits

    def _guarded(self, name: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Calls unless the sequence has failed; remembers a failure. Its text stays in the log: it may quote tokens."""
        if self._fault is not None:
            return None
        began = time.perf_counter()
        try:
            made = call(*arguments)
        except Exception as error:  # whatever a user's code raises ends this request alone
            log.exception("logits processor %s failed", name)
            self._fault = RequestFault(f"logits processor {name} raised {type(error).__name__}")
            return None
        if (seconds := time.perf_counter() - began) > MOST_SECONDS:
            self._fault = RequestFault(
                f"logits processor {name} took {seconds:.1f} s in one call, may take {MOST_SECONDS:.0f} s"
            )
        return made


def _fault_of(name: str, made: object, shape: torch.Size) -> RequestFault | None:
    """Says what is wrong with what a processor returned in the place of logits of this shape; None if nothing is."""
    if not isinstance(made, Tensor):
        return RequestFault(f"logits processor {name} returned {type(made).__name__}, must be {list(shape)}")
    if made.shape != shape:
        return RequestFault(f"logits processor {name} returned {list(made.shape)}, must be {list(shape)}")
    return RequestFault(f"logits processor {name} returned NaN") if made.isnan().any() else None
