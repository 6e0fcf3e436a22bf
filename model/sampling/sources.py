"""Where an engine's logits processors come from, beside the built-in ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.sampling.logits_processors import NamedFactory
from model.structured.grammar_store import GrammarStore


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorSources:
    """Sources of processors.

    Attributes:
        factories: Factories of the user's logits processors of each sequence.
        grammars: Compiled grammars of constraints; None for a model that can have none.
    """

    factories: Sequence[NamedFactory] = ()
    grammars: GrammarStore | None = None


NO_SOURCES = ProcessorSources()
