"""Names of linears that are stored in a format, and options that no writer writes."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.quantized.words import Scheme
from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.modules import MOST_RULES, in_layer, is_within, read_names, read_rules, rule_of
from model.weight_formats.registry import STORED

pytestmark = pytest.mark.sample(3)

PATH = Path("config.json")
SCHEMES = {"gptq": Scheme(32), "awq": Scheme(32, version="gemm")}
KEYS = (
    "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "zero_point", "version", "checkpoint_format",
    "format", "backend", "pack_dtype", "lm_head", "dynamic", "modules_in_block_to_quantize", "modules_to_not_convert",
    "is_marlin_format",
)  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 40) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.sampled_from(KEYS), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("name", SCHEMES)
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3))
def test_options_of_any_kind_are_read_or_refused(name: str, changes: dict[str, object]) -> None:
    with suppress(CheckpointError):
        made = STORED[name](Fields(PATH, SCHEMES[name].options() | changes))
        assert made.for_linear("model.layers.0.mlp.up_proj").tensors(64, 128)


@pytest.mark.parametrize(
    ("name", "layered"),
    [
        ("model.layers.0.mlp.up_proj", True),
        ("h.11.attn.c_attn", True),
        ("lm_head", False),
        ("model.decoder.project_out", False),
        ("model.layer5.proj", False),
    ],
)
def test_layers_are_numbered(name: str, layered: bool) -> None:
    assert in_layer(name) is layered


@pytest.mark.parametrize(
    ("part", "within"),
    [
        ("mlp", True),
        ("layers.1.mlp.", True),
        ("up_proj", True),
        ("up", False),
        ("1", True),
        ("layers.1.up_proj", False),
    ],
)
def test_names_stand_for_whole_components(part: str, within: bool) -> None:
    assert is_within("model.layers.1.mlp.up_proj", part) is within


def test_names_may_be_nested() -> None:
    fields = Fields(PATH, {"names": [["a", "b"], "c"], "other": [["a", ["b"]]]})
    assert read_names(fields, "names") == ["a", "b", "c"]
    assert read_names(fields, "missing") == []
    with pytest.raises(CheckpointError, match=r"'other' is .*, must be a list of names"):
        read_names(fields, "other")


def test_the_first_rule_counts() -> None:
    rules = read_rules(Fields(PATH, {"dynamic": {"+:.*up": {"bits": 8}, "-:.*mlp": {"bits": 2}, ".*": {}}}))
    found = [rule_of(rules, name) for name in ("0.mlp.up", "0.mlp.down", "0.o")]
    assert [None if rule is None else rule.overrides for rule in found] == [{"bits": 8}, None, {}]
    assert found[1] is rules[1]
    assert rule_of([], "0.mlp") is None
    assert read_rules(Fields(PATH, {"dynamic": False})) == []


def test_rules_are_bounded() -> None:
    with pytest.raises(CheckpointError, match="'dynamic' has 257 rules, may have 256"):
        read_rules(Fields(PATH, {"dynamic": {f"-:{i}": {} for i in range(MOST_RULES + 1)}}))
