"""docs/reference/families.md says what this suite checks, and the suite checks all that can be loaded."""

from model import served
from model.architectures.registry import ARCHITECTURES
from model.multimodal import NANO
from model.vision_families import KINDS
from tests.model.families.cases import CASES
from tests.model.families.table import PAGE, architecture, render
from tests.model.vision import cases, nano, table


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m tests.model.families.table`"


def test_every_architecture_has_a_case() -> None:
    assert {architecture(case) for case in CASES} == set(ARCHITECTURES)
    assert {table.architecture(case) for case in cases.CASES} == set(KINDS)
    assert table.NANO.keys() == nano.VERSIONS.keys()


def test_every_architecture_has_its_family_s_name() -> None:
    assert {architecture(case): case.family for case in CASES} == served.TEXT
    seeing = {table.architecture(case): table.FAMILIES[case.kind] for case in cases.CASES}
    assert seeing | {NANO: "nanoVLM"} == served.WITH_IMAGES


def test_names_are_told_apart() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
