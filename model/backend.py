"""Contract of a back end: the code that computes a model on one kind of device.

Each back end is a folder of its own, with its attention and its kernels: `model.cpu`, `model.gpu`, `model.reference`.
`model.backends` chooses among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache_manager.layout import KVLayout
from model.attention.backend import AttentionBackend
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import Model
from model.sampling.sampler import LogitOps, Starter
from model.tensors import ProductMaker


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Most of what a step has.

    Attributes:
        rows: Sequences.
        context: Tokens of a sequence, those in the KV pool included.
        tokens: Tokens that it computes.
    """

    rows: int
    context: int
    tokens: int


class Backend(Protocol):
    """Makes the parts of an engine that depend on the device.

    Attributes:
        numerics: Name of the arithmetic that fixes the bits of results. Only engines with the same one exchange KV
            pages.
        maker: Makes the products of a model while it is loaded. None for plain ones.
        logit_ops: Operations of the sampler.
        starter: Draws while the host goes on. None where the host draws.
    """

    @property
    def numerics(self) -> str: ...

    @property
    def maker(self) -> ProductMaker | None: ...

    @property
    def logit_ops(self) -> LogitOps: ...

    @property
    def starter(self) -> Starter | None: ...

    @property
    def last_compiled(self) -> Callable[[], float]:
        """Returns when a kernel was compiled last, in seconds of the monotonic clock.

        While one is being compiled this is the current time. 0 where none ever was. The function keeps no memory of the
        device: it is asked as long as there is the engine, which may have ended.
        """

    def attention(self, config: ModelConfig, layout: KVLayout, pages: int) -> AttentionBackend:
        """Allocates a KV pool of `pages` pages, and the attention over it."""

    def working_memory(self, decoder: Decoder, config: ModelConfig, layout: KVLayout, sizes: StepSizes) -> int:
        """Returns the bytes that the largest step takes beside weights and KV; 0 where it is not measured."""

    def model(self, decoder: Decoder, attention: AttentionBackend, sizes: StepSizes) -> Model:
        """Returns what runs the decoder over this attention, for steps of at most these sizes."""


class NoKernels(Exception):
    """Reports why a back end cannot run a model here."""
