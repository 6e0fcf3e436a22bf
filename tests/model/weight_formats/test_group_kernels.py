"""Checkpoints in groups by the CPU's kernels: near to the plain weights, and a row's bits its own."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from scheduler.settings import SchedulerSettings
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.gguf.writer import convert
from tests.model.weight_formats import test_awq as awq
from tests.model.weight_formats import test_gptq as gptq
from tests.model.weight_formats.packing import Scheme
from tests.support.checkpoints import write_llama
from tests.support.engines import Rig, make_request, make_rig
from tests.support.kernels import the_machine

pytestmark = pytest.mark.sample(3)

NEW = 6
FORMATS = {"gptq": gptq.twins_of, "awq": awq.twins_of}
CASES = [
    ("gptq", "llama-biases", Scheme(32, symmetric=True, scales=torch.float32)),
    ("gptq", "phi3", Scheme(32, bits=8, version="gptq_v2")),
    ("gptq", "gpt2", Scheme(-1)),
    ("awq", "llama-biases", Scheme(32)),
    ("awq", "mixtral", Scheme(32)),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("kernels"))


def run(directory: Path, backend: str, dtype: str, chunk: int | None, places: tuple[int, ...]) -> Rig:
    steps = SchedulerSettings(prefill_chunk=chunk)
    rig = make_rig(directory, 16, 2048, steps, True, backend=backend, dtype=dtype)
    rig.run({place: make_request(rig, PROMPTS[place], NEW) for place in places})
    return rig


@pytest.mark.parametrize(("form", "case", "scheme"), CASES)
def test_logits_are_near_those_of_the_plain_weights(
    form: str, case: str, scheme: Scheme, shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, plain = FORMATS[form](case, shelf, tmp_path, scheme)
    with caplog.at_level(logging.INFO, "quire.model"):
        found = run(stored, "auto", "float32", None, FEW)
    assert "kernels are not used" not in caplog.text
    expected = run(plain, "reference", "float32", None, FEW)
    for key, logits in expected.logits.items():
        np.testing.assert_allclose(found.logits[key], logits, atol=2e-3)


@pytest.mark.parametrize(("form", "case", "scheme"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample(3)
def test_no_schedule_changes_a_bit(
    form: str, case: str, scheme: Scheme, dtype: str, shelf: Shelf, tmp_path: Path
) -> None:
    stored, _ = FORMATS[form](case, shelf, tmp_path, scheme)
    together = run(stored, "auto", dtype, None, FEW)
    for place in FEW[:2]:
        alone = run(stored, "auto", dtype, 3, (place,))
        assert alone.results[place].tokens == together.results[place].tokens
        assert alone.logits_of(place) == together.logits_of(place)


TYPES = {
    "Q4_0": {"output": Kind.Q6_K, "": Kind.Q4_0},
    "Q8_0": {"": Kind.Q8_0},
    "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output": Kind.Q6_K, "": Kind.Q4_K},
    "Q5_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "": Kind.Q5_K},
    "IQ4_NL": {"": Kind.IQ4_NL},
}


@pytest.mark.parametrize("types", TYPES)
def test_files_as_llama_cpp_writes_them(types: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some with values in another type than the queries and keys of their product."""
    source = write_llama(tmp_path / "source", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    path, kinds = tmp_path / "model.gguf", TYPES[types]
    plain = convert(source, path, lambda name: next(kind for part, kind in kinds.items() if part in name))
    with caplog.at_level(logging.INFO, "quire.model"):
        found = run(path, "auto", "float32", None, FEW[:3])
    if types != "IQ4_NL" or the_machine().compiler.has_pairs:  # a codebook
        assert "kernels are not used" not in caplog.text
    expected = run(plain, "reference", "float32", None, FEW[:3])
    for key, logits in expected.logits.items():
        np.testing.assert_allclose(found.logits[key], logits, atol=2e-3)
    alone = run(path, "auto", "float32", 3, FEW[:1])
    assert alone.logits_of(FEW[0]) == found.logits_of(FEW[0])
