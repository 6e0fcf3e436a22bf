"""A GGUF file alone computes, bit for bit, what a checkpoint with the plain weights computes that it stands for."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.gguf.writer import all_in, convert
from tests.support.engines import make_request, make_rig

CASES = ["llama", "llama-biases", "llama-tied", "llama-linear", "llama-yarn", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("gguf"))


def bits(location: Path, ranks: int = 1) -> list[object]:
    settings = SchedulerSettings()
    rig = make_rig(location, 16, 2048, settings, True, dtype="float32", backend="reference", ranks=ranks)
    rig.run({place: make_request(rig, PROMPTS[place], 8) for place in FEW})
    return [(rig.results[place].tokens, rig.logits_of(place)) for place in FEW]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_plain_weights(case: str, kind: Kind, shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    plain = convert(shelf.checkpoint(BY_NAME[case]), path, all_in(kind))
    assert bits(path) == bits(plain)
