"""Seams of a forward pass, each with an implementation that the product does not have."""

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures.registry import load_model
from model.attention.backend import StepShape
from model.config import ModelConfig, read_config
from model.cpu.attention_backend import CpuAttention
from model.cpu.backend import CpuBackend
from model.cpu.decoder import CompiledDecoder
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.layers import Linear, Product
from model.reference.attention_backend import ReferenceAttention
from model.weights import Checkpoint
from tests.model.families.cases import CASES
from tests.model.families.checkpoints import write
from tests.support.kernels import the_machine
from tests.support.sectioned import sectioned

PAGE = 16
CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "mixtral"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(next(case for case in CASES if case.name == request.param), tmp_path)


def decoder_of(directory: Path) -> tuple[Decoder, ModelConfig]:
    config = read_config(directory)
    return load_model(config, Checkpoint(directory), torch.float32, CPU), config


def batch_of(config: ModelConfig, prompts: list[list[int]], **changes: Any) -> ForwardBatch:
    """All tokens of these prompts in one step, wanting each."""
    layout = config.kv_layout(PAGE, "float32")
    attention = ReferenceAttention(
        layout, 4 * len(prompts), config.heads, "float32", CPU, config.scale, config.soft_cap
    )
    groups = len(layout.groups)
    table = np.tile(np.arange(4 * len(prompts), dtype=np.int32).reshape(len(prompts), 4), (groups, 1, 1))
    slices = np.array([[row, 0, len(prompt)] for row, prompt in enumerate(prompts)], np.int32)
    positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
    rows = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    slots = table[:, rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    plan = attention.plan(StepShape(slices, positions, slots, table, np.zeros(len(prompts), np.int64)))
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    batch = ForwardBatch(tokens, torch.from_numpy(positions)[None], torch.arange(len(tokens)), attention, plan)
    return replace(batch, **changes)


def logits_of(decoder: Decoder, batch: ForwardBatch) -> Tensor:
    with torch.inference_mode():
        return decoder.forward(batch).logits


def with_products(part: Any, change: Any) -> Any:
    """The same part with another product in the place of each."""
    if isinstance(part, Linear):
        return change(part)
    if isinstance(part, list | tuple):
        return [with_products(one, change) for one in part]
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: with_products(getattr(part, f.name), change) for f in fields(part)})


@dataclass(frozen=True)
class Adapted:
    """A product with an adapter (Hu et al., LoRA, 2021) for some of the step's tokens."""

    inner: Product
    scales: Tensor  # [tokens] of the step, 0 for those without the adapter

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        assert batch is not None
        y = self.inner(x, batch)
        down = torch.linspace(-1, 1, x.shape[1])
        return y + (x * down).sum(-1, keepdim=True) * batch.of_rows(self.scales)[:, None]


def test_a_product_knows_the_tokens_of_its_rows(directory: Path) -> None:
    """Each sequence of a mixed step gets its own adapter, through experts and the output layer too."""
    decoder, config = decoder_of(directory)
    prompts = [[5, 9, 31], [7, 7, 8, 200, 3], [90]]
    scales = [0.0, 0.01, -0.02]
    expected = []
    for prompt, scale in zip(prompts, scales, strict=True):
        alone = torch.full((len(prompt),), scale)
        expected.append(logits_of(with_products(decoder, lambda p, s=alone: Adapted(p, s)), batch_of(config, [prompt])))
    each = torch.cat([torch.full((len(p),), s) for p, s in zip(prompts, scales, strict=True)])
    together = logits_of(with_products(decoder, lambda p: Adapted(p, each)), batch_of(config, prompts))
    assert torch.allclose(together, torch.cat(expected), atol=1e-5)
    assert torch.allclose(together[:3], logits_of(decoder, batch_of(config, prompts[:1])), atol=1e-5)
    assert not torch.allclose(together[3:], logits_of(decoder, batch_of(config, prompts))[3:], atol=1e-3)


def test_hidden_states_are_what_the_output_layer_reads(directory: Path) -> None:
    decoder, config = decoder_of(directory)
    wanted = torch.tensor([4, 0])
    with torch.inference_mode():
        output = decoder.forward(batch_of(config, [[5, 9, 31, 8, 17]], hidden=True, wanted=wanted))
        assert output.hidden is not None
        assert torch.equal(decoder.head(output.hidden).float(), output.logits)
        assert decoder.forward(batch_of(config, [[5]])).hidden is None


def test_the_cpu_program_gives_the_same_hidden_states(directory: Path) -> None:
    decoder, config = decoder_of(directory)
    kernels, layout = the_machine(), config.kv_layout(PAGE, "float32")

    maker = CpuBackend(kernels, "float32", "float32").maker
    compiled = load_model(config, Checkpoint(directory), torch.float32, CPU, maker=maker)
    attention = CpuAttention(kernels, layout, 4, config.heads, "float32", config.scale, config.soft_cap, None)
    wanted = torch.tensor([4, 0])
    batch = batch_of(config, [[5, 9, 31, 8, 17]], hidden=True, wanted=wanted)
    slots = np.tile(np.arange(5), (len(layout.groups), 1))
    table = np.zeros((len(layout.groups), 1, 4), np.int32)
    plan = attention.plan(StepShape(np.array([[0, 0, 5]], np.int32), np.arange(5), slots, table, np.zeros(1, np.int64)))
    with torch.inference_mode():
        expected = decoder.forward(batch)
        found = CompiledDecoder(kernels, compiled).forward(replace(batch, attention=attention, plan=plan))
    assert expected.hidden is not None
    assert found.hidden is not None
    assert torch.allclose(found.hidden, expected.hidden, atol=1e-4)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)


def test_positions_may_have_several_axes(directory: Path) -> None:
    decoder, config = decoder_of(directory)
    plain, several = batch_of(config, [[5, 9, 31, 8, 17]]), sectioned(decoder)
    alike = replace(plain, positions=plain.positions.expand(4, -1).contiguous())
    assert torch.equal(logits_of(several, alike), logits_of(decoder, plain))
    other = alike.positions.clone()
    other[2] *= 2  # a constant would change nothing: attention sees differences of angles
    assert not torch.allclose(logits_of(several, replace(alike, positions=other)), logits_of(decoder, plain), atol=1e-3)


def test_the_cpu_program_turns_by_the_same_axes(directory: Path) -> None:
    decoder, config = decoder_of(directory)
    kernels, layout = the_machine(), config.kv_layout(PAGE, "float32")

    maker = CpuBackend(kernels, "float32", "float32").maker
    compiled = sectioned(load_model(config, Checkpoint(directory), torch.float32, CPU, maker=maker))
    attention = CpuAttention(kernels, layout, 4, config.heads, "float32", config.scale, config.soft_cap, None)
    slots, table = np.tile(np.arange(5), (len(layout.groups), 1)), np.zeros((len(layout.groups), 1, 4), np.int32)
    plan = attention.plan(StepShape(np.array([[0, 0, 5]], np.int32), np.arange(5), slots, table, np.zeros(1, np.int64)))
    axes = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 1, 1, 3], [0, 1, 1, 2, 3], [0, 1, 2, 1, 3]])
    batch = batch_of(config, [[5, 9, 31, 8, 17]], positions=axes)
    with torch.inference_mode():
        found = CompiledDecoder(kernels, compiled).forward(replace(batch, attention=attention, plan=plan)).logits
    assert torch.allclose(found, logits_of(sectioned(decoder), batch), atol=1e-4)
    assert not torch.allclose(found, logits_of(decoder, batch), atol=1e-3)
