"""Runs one step of a model by the GPU back end's own code, on tensors without numbers, and returns its launches.

Models are run with one layer and with two. All their layers are alike: a further layer adds what the second one does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bench.gpu_ledger.cases import CONTEXT, SEQUENCES, STEP_TOKENS, LedgerModel, Regime
from bench.gpu_ledger.costs import SUM, Work
from bench.gpu_ledger.recording import Launch, Recording, recorded
from model.attention.backend import StepShape
from model.backend import StepSizes
from model.decoder import Decoder
from model.footprint import shape_of
from model.forward import ForwardBatch, Model
from model.gpu.attention_backend import TritonAttention
from model.gpu.draws import start_draws
from model.gpu.graphs import GraphDecoder, Recorder, why_not
from model.gpu.parts import with_kernels
from model.gpu.tuning import tuning_for
from model.gpu.unlaunched import ZeroAnswers
from model.parallel.collective import ONE_RANK, Collective, Ranks
from model.parallel.shard import Shard
from model.parallel.sums import LEAST_SAVED, Adder, add_in_order, sum_of_ranks
from model.sampling.sampler import SamplingRows

META, HOST = torch.device("meta"), torch.device("cpu")
PAGE = 16
DTYPE = "bfloat16"
CAPABILITY = (9, 0)
DEVICE_NAME = "NVIDIA H100"
"""A device that sizes of tiles are looked up for; the table has one row for H100 and H200."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerEngine:
    """A model without numbers. Attention's plans have numbers, and its pool has one page."""

    model: Model
    attention: TritonAttention

    @staticmethod
    def of(model: LedgerModel, layers: int, recorder: Recorder | None, collective: Collective | None) -> "LedgerEngine":
        """Makes a model.

        Args:
            model: The model.
            layers: Its number of layers.
            recorder: Records graphs. None: steps run launch by launch.
            collective: Collectives of its ranks.
        """
        shard = Shard(0, model.ranks)
        decoder = decoder_of(model, layers, ONE_RANK if collective is None else Ranks(shard, collective))
        own = shard.of(model.config(layers))
        tuning = tuning_for(DEVICE_NAME, CAPABILITY, own.head_dim, "half")
        attention = TritonAttention(
            own.kv_layout(PAGE, DTYPE), 1, own.heads, DTYPE, HOST, DTYPE, own.scale, own.soft_cap, tuning
        )
        if recorder is None or why_not(decoder) is not None:
            return LedgerEngine(decoder, attention)
        sizes = StepSizes(SEQUENCES, CONTEXT, STEP_TOKENS)
        return LedgerEngine(GraphDecoder(decoder, attention, sizes, recorder), attention)

    def run(self, regime: Regime, shape: StepShape) -> None:
        """Runs a step: plan, forward pass, and greedy draws."""
        tokens, positions, wanted = (
            torch.empty(size, dtype=torch.int64, device=META)
            for size in (regime.tokens, (1, regime.tokens), regime.sequences)
        )
        batch = ForwardBatch(tokens, positions, wanted, self.attention, self.attention.plan(shape))
        self.draw(self.model.forward(batch).logits, regime)

    def draw(self, logits: Tensor, regime: Regime) -> None:
        rows = np.arange(regime.sequences)
        start_draws(logits, SamplingRows(SEQUENCES), rows, np.full(regime.sequences, regime.before + regime.now))


def decoder_of(model: LedgerModel, layers: int, ranks: Ranks = ONE_RANK) -> Decoder:
    """Makes a decoder with the GPU's kernels, without numbers."""
    with ZeroAnswers(), torch.inference_mode():
        return with_kernels(shape_of(model.config(layers), getattr(torch, DTYPE), ranks=ranks))


class RecordedEngine:
    """A `LedgerEngine` whose steps are recorded."""

    def __init__(self, model: LedgerModel, layers: int) -> None:
        with recorded() as self._recording, torch.inference_mode():
            collective = None if model.ranks == 1 else CountedCollective(Shard(0, model.ranks), self._add)
            self._engine = LedgerEngine.of(model, layers, self._recorder, collective)

    def step(self, regime: Regime) -> Recording:
        shape = shape_of_step(regime)
        with recorded() as self._recording, torch.inference_mode():
            self._engine.run(regime, shape)
        return self._recording

    def _recorder(self, work: Callable[[], object]) -> Callable[[], object]:
        def replay() -> object:
            with self._recording.replay():
                return work()

        return replay

    def _add(self, name: str, work: Work) -> None:
        self._recording.add(name, work)


@dataclass(slots=True, eq=False)
class CountedCollective:
    """`Collective` that moves nothing, and counts the bytes that a ring would (Patarasu and Yuan, 2009)."""

    shard: Shard
    add: Callable[[str, Work], None]
    name: str = "counted"
    runs_ahead: bool = True
    _linked: float = 0.0  # bytes of the sum that is made, until its first exchange

    def sum(self, x: Tensor, add: Adder = add_in_order) -> Tensor:
        """Counts the bytes of a ring's sum, though whole parts are more: the floor is of any code."""
        self._linked = 2 * x.nbytes * (self.shard.size - 1) / self.shard.size
        return sum_of_ranks(x, self.shard.size, self, add, LEAST_SAVED["nccl"])

    def all_gather(self, x: Tensor) -> Tensor:
        return self._exchanged("all_gather", x.new_empty((self.shard.size, *x.shape)))

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._exchanged("all_to_all", torch.empty_like(x))

    def _exchanged(self, name: str, made: Tensor) -> Tensor:
        linked, self._linked = self._linked, 0.0
        self.add(name, Work(SUM, linked=linked))
        return made

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.add("gather", Work(SUM, linked=x.itemsize * len(x) * (sum(widths) - widths[0])))
        return x.new_empty((len(x), sum(widths)))

    def started(self) -> None: ...

    def fail(self, why: str) -> None: ...

    def lives(self) -> list[int]:
        return []

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LedgerStep:
    """A recorded step.

    Attributes:
        launches: Number of each launch.
        graphs: CUDA graphs that it replays.
    """

    launches: Counter[Launch]
    graphs: int

    def total(self, of: Callable[[Work], float]) -> float:
        """Returns the sum over all launches."""
        return sum(count * of(launch.work) for launch, count in self.launches.items())

    @property
    def count(self) -> int:
        """Number of launches, those within a graph included."""
        return self.launches.total()


def step_of(model: LedgerModel, regime: Regime) -> LedgerStep:
    """Records a step of a model."""
    one, two = (engine.step(regime) for engine in _engines(model))
    launches, added = Counter(one.launches), Counter(two.launches)
    added.subtract(launches)
    if any(count < 0 for count in added.values()):
        raise ValueError(f"{model.name}: a second layer takes launches of the first away")
    for launch, count in added.items():
        launches[launch] += (model.layers - 1) * count
    return LedgerStep(launches, one.graphs)


@cache
def _engines(model: LedgerModel) -> tuple[RecordedEngine, RecordedEngine]:
    """Returns the model with one layer, and with two."""
    return RecordedEngine(model, 1), RecordedEngine(model, 2)


def shape_of_step(regime: Regime) -> StepShape:
    """Returns the shape of a step whose sequences share no page."""
    before, now, sequences = regime.before, regime.now, regime.sequences
    pages = -(-(before + now) // PAGE)
    tables = np.arange(sequences * pages, dtype=np.int32).reshape(1, sequences, pages)
    slices = np.array([[row, before, now] for row in range(sequences)], np.int32)
    positions = np.tile(np.arange(before, before + now), sequences)
    rows = np.arange(sequences).repeat(now)
    slots = (tables[0, rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)[None]
    return StepShape(slices, positions, slots, tables, np.zeros(sequences, np.int64), None)
