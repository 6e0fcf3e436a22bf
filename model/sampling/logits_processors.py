"""Logits processors of users: their contract, their discovery, and the consequences of a failure.

A processor belongs to one sequence. It sees that sequence's tokens and changes the logits of its next draw, after the
request's own controls and before temperature. The interface is row by row, as vLLM's first one was. A mistake in one
sequence's processor ends that request and touches no other.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import RequestFault
from scheduler.controls import LogitsParams

ENTRY_POINTS = "quire.logits_processors"
MOST_SECONDS = 1.0  # of one call; the other sequences of the step wait for it

T = TypeVar("T")
Ints = NDArray[np.int64]

log = logging.getLogger("quire.sampling")


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence.

    It must be pure: its result depends on the prompt and the drawn tokens alone. A sequence that is preempted, or moved
    to another engine, gets a new processor. `drew` is then called for each earlier token.
    """

    def drew(self, token: int) -> None:
        """Records the next output token."""

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """Changes the logits of a draw. May be called several times for one draw.

        Args:
            logits: [vocabulary] float32, on the model's device. May be changed in place.
            position: Position of the drawn token in the output, from 0.

        Returns:
            [vocabulary] float32. A token at -inf is not drawn.
        """


LogitsProcessorFactory = Callable[..., LogitsProcessor | None]
"""Makes the processor of a sequence from its prompt, [tokens] int32. None: the sequence has no processor.

What a request's `logits_processors_args` have under the factory's name are its keyword arguments: `factory(prompt,
**args)`. The name is that of the entry point, or the factory's own `__name__`.

A factory that needs time, to compile a grammar for example, has a method `ready(prompt, **args) -> bool`. It returns at
once, and begins the preparations where there are any. It is asked before a sequence is admitted, until it returns True,
and again after a preemption. Meanwhile the request waits in the queue, and no other request waits for it. The factory
may be called on another thread than `ready`.
"""


@dataclass(frozen=True, slots=True)
class NamedFactory:
    """A factory, and its name in requests and errors."""

    name: str
    make: LogitsProcessorFactory

    @staticmethod
    def of(factory: LogitsProcessorFactory) -> "NamedFactory":
        """Names a factory after itself."""
        return NamedFactory(getattr(factory, "__name__", type(factory).__name__), factory)


Args = Mapping[str, Mapping[str, Any]]
"""Keyword arguments by the name of their factory."""


def args_of(params: LogitsParams) -> Args:
    """Returns the arguments that a request has for logits processors."""
    return {name: json.loads(text) for name, text in params.processors_args}


def load_factories(names: str | None) -> list[NamedFactory]:
    """Loads factories from the entry points `quire.logits_processors` of installed distributions.

    Args:
        names: Names separated by commas, in the order in which they apply. None for none.

    Raises:
        ValueError: A name has no entry point, or its entry point cannot be imported or called.
    """
    asked = [part.strip() for part in (names or "").split(",") if part.strip()]
    if not asked:
        return []  # without reading the metadata of all distributions, which slows an engine's start
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    factories: list[NamedFactory] = []
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
        factories.append(NamedFactory(name, factory))
    return factories


class UserProcessors:
    """A user's processors of one sequence, in their order.

    After a failure none of them is called again: `apply` raises the same fault until the request has ended.
    """

    def __init__(self, factories: Sequence[NamedFactory], prompt: NDArray[np.int32], args: Args) -> None:
        """Makes the processors from the prompt and the request's arguments."""
        self._processors: list[tuple[str, LogitsProcessor]] = []
        self._fault: RequestFault | None = None
        for factory in factories:
            make = partial(factory.make, **args.get(factory.name, {}))
            processor = self._guarded(factory.name, make, prompt.copy())
            if processor is not None:
                self._processors.append((factory.name, processor))

    @classmethod
    def of(cls, factories: Sequence[NamedFactory], prompt: NDArray[np.int32], args: Args) -> Self | None:
        """Makes the processors of a sequence; None where it has none, and none failed to be made."""
        made = cls(factories, prompt, args)
        return made if made._processors or made._fault is not None else None

    def drew(self, token: int) -> None:
        for name, processor in self._processors:
            self._guarded(name, processor.drew, token)

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """Applies each processor to the result of the one before.

        Args:
            logits: [vocabulary] float32. May be changed in place.
            position: Position of the drawn token in the output.

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

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], positions: Ints) -> None:
        """Changes the logits of a step's rows, in place, one row after the other. As `BuiltIn.apply_rows`."""
        for row, processor, position in zip(rows.tolist(), processors, positions.tolist(), strict=True):
            logits[row] = processor.apply(logits[row].clone(), position)

    def _guarded(self, name: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Calls a processor unless the sequence has failed, and records a failure.

        The failure's text stays in the log, as it may quote tokens.
        """
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
    """Checks a processor's result; returns the fault, or None for logits of this shape."""
    if not isinstance(made, Tensor):
        return RequestFault(f"logits processor {name} returned {type(made).__name__}, must be {list(shape)}")
    if made.shape != shape:
        return RequestFault(f"logits processor {name} returned {list(made.shape)}, must be {list(shape)}")
    return RequestFault(f"logits processor {name} returned NaN") if made.isnan().any() else None
