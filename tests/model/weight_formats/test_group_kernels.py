"""Checkpoints in groups by the CPU's kernels: near to the reference back end, and a row's bits its own."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.settings import SchedulerSettings
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.weight_formats import test_awq as awq
from tests.model.weight_formats import test_gptq as gptq
from tests.model.weight_formats.packing import Scheme
from tests.support.engines import Rig, make_request, make_rig

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
def test_no_schedule_changes_a_bit(
    form: str, case: str, scheme: Scheme, dtype: str, shelf: Shelf, tmp_path: Path
) -> None:
    stored, _ = FORMATS[form](case, shelf, tmp_path, scheme)
    together = run(stored, "auto", dtype, None, FEW)
    for place in FEW[:2]:
        alone = run(stored, "auto", dtype, 3, (place,))
        assert alone.results[place].tokens == together.results[place].tokens
        assert alone.logits_of(place) == together.logits_of(place)
