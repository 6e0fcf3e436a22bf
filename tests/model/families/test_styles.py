"""Law: how a checkpoint is written down changes no token: old or new words in config.json, names, files, buffers."""

from pathlib import Path

import pytest

from tests.model.families import reference
from tests.model.families.cases import Case
from tests.model.families.conftest import Shelf
from tests.model.families.parity import ask, compare
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import STYLED, Style

PLACES = (FEW[1], FEW[5], FEW[-1])

each_style = pytest.mark.parametrize(
    ("case", "style"), STYLED, ids=[f"{case.name}: {style.name}" for case, style in STYLED]
)


@each_style
@pytest.mark.slow
def test_tokens_are_the_same(case: Case, style: Style, shelf: Shelf, tmp_path: Path) -> None:
    directory = style.copy(shelf.checkpoint(case), tmp_path)
    compare(ask(directory, PLACES), shelf.reference(case))


@pytest.mark.slow
@each_style
def test_transformers_reads_it_too(case: Case, style: Style, shelf: Shelf, tmp_path: Path) -> None:
    """Else it would be no style, but a mistake of this suite."""
    model = reference.load(style.copy(shelf.checkpoint(case), tmp_path))
    ids = [shelf.reference(case).ids[place] for place in PLACES]
    logits = reference.logits_after(model, [PROMPTS[place] for place in PLACES], ids)
    assert logits.argmax(-1).tolist() == ids
