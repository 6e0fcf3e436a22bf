"""Tables of embeddings in 8 bits: their numbers, in torch and in the CPU's kernels, and which models have them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import BFLOAT, FLOAT, Element
from model.cpu.kernels.embedding import write_eight_bit_embedding
from model.cpu.kernels.machine import open_machine
from model.cpu.kernels.program import Call, Machine
from model.embedding_table import EightBitRows, EightBitTable, PlainTable
from model.gguf_weights import open_checkpoint
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format
from tests.model.gguf.writer import convert
from tests.support.checkpoints import write_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def machine() -> Machine:
    return open_machine(None)


def drawn(rows: int, width: int, groups: int, offsets: bool, seed: int = 0) -> EightBitRows:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(-128, 128, (rows, width)).astype(np.int8))
    scales, least = (torch.from_numpy(rng.normal(size=(rows, groups)).astype(np.float32)) for _ in range(2))
    return EightBitRows(values, scales, least if offsets else None)


def stated(rows: EightBitRows) -> np.ndarray:
    """The numbers of all rows, float32, by numpy."""
    size = rows.values.shape[1] // rows.scales.shape[1]
    made = rows.values.numpy().astype(np.float32) * rows.scales.numpy().repeat(size, axis=1)
    return made if rows.offsets is None else made + rows.offsets.numpy().repeat(size, axis=1)


@given(
    groups=st.integers(1, 5), size=st.integers(1, 40), offsets=st.booleans(), ids=st.lists(st.integers(0, 8)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_rows_are_those_stated_beside_any_others(
    groups: int, size: int, offsets: bool, ids: list[int], dtype: torch.dtype, seed: int
) -> None:
    table = EightBitTable("", drawn(9, groups * size, groups, offsets, seed), dtype)
    found = table.look_up(torch.tensor(ids, dtype=torch.int64))
    assert found.dtype == dtype
    assert torch.equal(found, torch.from_numpy(stated(table.rows)).to(dtype)[ids].view(-1, groups * size))


@pytest.mark.parametrize("element", [FLOAT, BFLOAT], ids=lambda e: e.name)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 48), (3, 16), (2, 32), (1, 576)])
def test_kernels_have_the_bits_of_torch(
    machine: Machine, element: Element, learned: bool, offsets: bool, groups: int, size: int
) -> None:
    width, rows = groups * size, drawn(20, groups * size, groups, offsets)
    positions = torch.randn((30, width), generator=torch.Generator().manual_seed(1)).to(element.dtype)
    ids, places = torch.tensor([3, 19, 0, 3]), torch.tensor([7, 0, 29, 8])
    cells = np.array([4, ids.data_ptr(), places.data_ptr()], np.int64)
    y = Buffer.of(4, width, FLOAT)
    least = 0 if rows.offsets is None else rows.offsets
    arguments = (
        *(cells.ctypes.data + 8 * number for number in range(3)), rows.values, rows.scales, least, positions, y.tensor,
        y.stride, groups, size, 2.7,
    )  # fmt: skip
    name = f"eight_bit_embedding_{element.name}{'_offsets' if offsets else ''}{'_positions' if learned else ''}"
    machine.program([Call(name, write_eight_bit_embedding(element, learned, offsets), arguments)]).run()
    expected = EightBitTable("", rows, torch.float32).look_up(ids) * torch.tensor(2.7)
    assert torch.equal(y.tensor[:4, :width], expected + positions[places].float() if learned else expected)


def table_of(location: Path, quantization: str | None = None) -> Any:
    config = read_config(location)
    tensors = Tensors(open_checkpoint(location, config), torch.float32, CPU, open_weight_format(config, quantization))
    with torch.inference_mode():
        return build_model(config, tensors).embedding.tokens


OF_GGUF = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q6_K, Kind.Q4_K, Kind.Q2_K, Kind.IQ4_XS)


@pytest.mark.parametrize("kind", OF_GGUF, ids=lambda kind: kind.name)
def test_rows_of_a_gguf_file_are_its_numbers(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    source = write_llama(tmp_path / "source", hidden_size=256, num_hidden_layers=1)
    plain = table_of(convert(source, path, lambda name: kind if name == "token_embd.weight" else Kind.F32))
    table = table_of(path)
    assert isinstance(plain, PlainTable)
    assert isinstance(table, EightBitTable)
    every = torch.arange(table.vocabulary)
    assert torch.equal(table.look_up(every), plain.look_up(every))
    assert table.nbytes < 0.4 * plain.nbytes
    assert table.rows.values.unique().numel() > 3


@pytest.mark.parametrize(("quantization", "kind"), [(None, PlainTable), ("int8", PlainTable), ("int4", EightBitTable)])
@pytest.mark.parametrize("tied", [False, True])
def test_int4_has_a_table_in_8_bits(quantization: str | None, kind: type, tied: bool, tmp_path: Path) -> None:
    assert type(table_of(write_llama(tmp_path, tie_word_embeddings=tied), quantization)) is kind


def test_a_scale_of_another_group_is_seen() -> None:
    rows = drawn(9, 64, 4, offsets=True)
    ids = torch.arange(9)

    def numbers(of: EightBitRows) -> Tensor:
        return EightBitTable("", of, torch.float32).look_up(ids)

    for changed in (
        replace(rows, scales=rows.scales.roll(1, 1)), replace(rows, scales=rows.scales.roll(1, 0)),
        replace(rows, offsets=None), replace(rows, values=rows.values ^ 1),
    ):  # fmt: skip
        assert not torch.equal(numbers(changed), torch.from_numpy(stated(rows)))
