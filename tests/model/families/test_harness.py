"""The suite can fail: mistakes that are planted in checkpoints show, and so does each tensor that is left out."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.model.families import reference
from tests.model.families.cases import CASES, Case
from tests.model.families.conftest import Shelf
from tests.model.families.faults import FAULTS, Fault
from tests.model.families.parity import NEAR, Mismatch, ask, compare
from tests.model.families.prompts import FEW, PROMPTS

PLACES = (FEW[3], FEW[5], FEW[-1])
UNSEEN = {  # a constant that is added to all keys adds the same to all scores, where positions turn nothing
    "opt": r"k_proj\.bias",
    "opt-post-norm": r"k_proj\.bias",
    "smollm3-window": r"layers\.[13]\.self_attn\.k_proj\.bias",
    "llama4-dense": r"layers\.[13]\.self_attn\.k_proj\.bias",
    "cohere2-mixed": r"layers\.[02]\.self_attn\.k_proj\.bias",
}
FEWEST = {"cohere": 4, "cohere2": 5}  # norms and biases: one norm a layer, and the last


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(shelf: Shelf) -> Callable[[Case], reference.Reference]:
    """Returns what transformers says of a few prompts, which is what Quire says of one that has no fault."""

    @cache
    def read(case: Case) -> reference.Reference:
        directory = shelf.checkpoint(case)
        right = reference.read(directory, PROMPTS, FEW, padded=case.padded)
        compare(ask(directory, PLACES[:1]), right)
        return right

    return read


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_noticed(
    fault: Fault, shelf: Shelf, said: Callable[[Case], reference.Reference], tmp_path: Path
) -> None:
    right = said(fault.case)
    shutil.copytree(shelf.checkpoint(fault.case), tmp_path, dirs_exist_ok=True)
    fault.plant(tmp_path)
    with pytest.raises(Mismatch):
        compare(ask(tmp_path, PLACES), right)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_norm_and_bias_matters(case: Case, shelf: Shelf, said: Callable[[Case], reference.Reference]) -> None:
    """With any one of them as if it were not there, transformers itself would give other first log-probabilities."""
    model = reference.load(shelf.checkpoint(case))
    prompts = [PROMPTS[place] for place in FEW]
    ids = [one[:1] for one in said(case).ids]
    right = reference.logits_after(model, prompts, ids).log_softmax(-1)
    neutral = 0.0 if case.kind.__name__.startswith("Gemma") else 1.0
    found = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or (case.name in UNSEEN and re.search(UNSEEN[case.name], name)):
            continue
        kept = parameter.data.clone()
        parameter.data.fill_(0.0 if name.endswith("bias") else neutral)
        wrong = reference.logits_after(model, prompts, ids).log_softmax(-1)
        parameter.data.copy_(kept)
        assert (wrong - right).abs().max() > 5 * NEAR, name
        found += 1
    assert found >= FEWEST.get(case.name, 7), "norms and biases have other names than this test knows"
