"""For which steps there are graphs, and of which models."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.backend import StepSizes
from model.blocks import Experts, GatedMLP, SelfAttention
from model.embedding_table import PlainTable
from model.forward import ForwardBatch, ForwardOutput
from model.gpu.graphs import GraphDecoder, sizes_of_graphs, sizes_of_steps, why_not
from model.gpu.parts import KernelSummed
from model.layers import silu
from model.parallel.collective import Gathered, Summed
from model.parallel.shard import Shard
from model.parallel.unconnected import Unconnected
from model.rope import Rope
from model.routing import Routing
from tests.support.sectioned import in_turn


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 100, 256, 1000])
def test_a_step_is_filled_up_by_a_third_at_most(most: int) -> None:
    sizes = sizes_of_graphs(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        up = next(size for size in sizes if size >= rows)
        assert rows <= 4 or 3 * (up - rows) < up


def test_a_model_with_experts_is_not_recorded() -> None:
    mlp = GatedMLP(abs, abs, silu)
    assert why_not([mlp, (mlp,)]) is None
    assert "experts" in (why_not([mlp, (Experts(abs, [mlp], Routing(1, normalised=True)),)]) or "")


def test_a_model_that_turns_by_several_axes_is_not_recorded() -> None:
    rope = Rope(torch.ones(4), 8, torch.float32, torch.device("cpu"))
    attention = SelfAttention(0, 1, 1, 8, abs, abs, rope)
    assert why_not([attention]) is None
    assert "several axes" in (why_not([replace(attention, rope=in_turn(rope))]) or "")


def test_a_model_that_is_divided_among_ranks_is_recorded_where_exchanges_are_on_the_stream() -> None:
    for ahead in (False, True):
        alone = Unconnected(Shard(0, 2), runs_ahead=ahead)
        for part in (Summed(abs, alone), KernelSummed(abs, alone), Gathered(abs, [1, 1], alone)):  # type: ignore[arg-type]
            assert (why_not([part]) is None) == ahead
            assert ahead or "ranks" in (why_not([part]) or "")


class Attention:
    can_mix = True

    def fix(self, rows: Any, tokens: Any, context: int) -> None: ...

    def empty_plan(self, rows: int, kinds: Any) -> Any:
        return SimpleNamespace(rows=rows)


class Embedded:
    """A decoder whose logits are the tokens at the wanted places. ran: tokens of each run of its layers."""

    embedding, vision = SimpleNamespace(tokens=PlainTable("", torch.zeros(9, 1))), None

    def __init__(self) -> None:
        self.ran: list[int] = []

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        return self.read_out(self.residual(batch), batch, out)

    def residual(self, batch: ForwardBatch) -> Tensor:
        self.ran.append(len(batch.tokens))
        return batch.tokens.float()[:, None]

    def read_out(self, x: Tensor, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        logits = x[batch.wanted].expand(-1, 9)
        return ForwardOutput(logits if out is None else out.copy_(logits))


def test_rows_that_fill_a_step_up_want_nothing_of_an_earlier_one() -> None:
    """A sequence that does not draw leaves places behind its own; more rows may be wanted than there are sequences."""
    made = GraphDecoder(Embedded(), Attention(), StepSizes(8, 64, 48), lambda work: work)  # type: ignore[arg-type]

    def step(rows: int, tokens: list[int], wanted: list[int]) -> list[float]:
        plan, positions = SimpleNamespace(rows=rows, shares=False, mixed=False), torch.arange(len(tokens))[None]
        batch = ForwardBatch(torch.tensor(tokens), positions, torch.tensor(wanted), Attention(), plan)  # type: ignore[arg-type]
        return made.forward(batch).logits[:, 0].tolist()

    assert step(6, [5, 6, 7, 8, 4], [0, 1, 3, 4]) == [5, 6, 8, 4]
    assert step(4, [1, 2, 3], [0, 2]) == [1, 3]
    assert step(2, [1, 2], [0, 1, 1]) == [1, 2, 2]
    assert step(0, [3, 2, 1], [2]) == [1]


def test_steps_of_several_tokens_a_sequence_are_filled_up_too() -> None:
    decoder = Embedded()
    made = GraphDecoder(decoder, Attention(), StepSizes(8, 64, 48), lambda work: work)  # type: ignore[arg-type]
    tokens = torch.arange(40)

    def step(rows: int, mixed: bool, wanted: list[int], count: int = 40, **more: Any) -> list[float]:
        plan = SimpleNamespace(rows=rows, shares=True, mixed=mixed)
        batch = ForwardBatch(
            tokens[:count], torch.arange(count)[None], torch.tensor(wanted), Attention(), plan, **more  # type: ignore[arg-type]
        )  # fmt: skip
        return made.forward(batch).logits[:, 0].tolist()

    decoder.ran.clear()
    assert step(48, True, [39, 0, 7]) == [39, 0, 7]
    assert step(16, True, [1] * 20, 14) == [1] * 20, "more than a graph of decodes has room for"
    assert step(48, True, [5], hidden=True) == [5]
    assert step(0, False, [5]) == [5]
    assert decoder.ran == [48, 16, 48, 40]


@pytest.mark.parametrize("most", [64, 1024, 1500])
def test_little_is_filled_up_of_large_steps(most: int) -> None:
    sizes = sizes_of_steps(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for tokens in range(1, most + 1):
        up = next(size for size in sizes if size >= tokens)
        assert up - tokens < (16 if tokens <= 112 else 64)
