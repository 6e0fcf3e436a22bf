"""A format with several tensors a linear, another layout and groups of inputs needs no edit elsewhere.

Law: a model whose weights are stored in `Groups` computes, bit for bit, what one with the plain weights computes that
they stand for.
"""

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import config as config_file
from model.architectures.registry import build_model
from model.config import STORED_FORMATS, read_config
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.loading import load_computer
from model.parallel.collective import Ranks
from model.parallel.shard import Shard
from model.settings import ALONE, QUANTIZATIONS, ModelSettings
from model.tensors import Tensors
from model.weight_formats import registry
from model.weight_formats.groups import GroupWeights, bring_back
from model.weight_formats.levels import INT4
from model.weight_formats.registry import ONLINE, STORED, open_weight_format
from model.weights import Checkpoint
from rpc.cli.estimate import estimate
from scheduler.settings import SchedulerSettings
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import edit_config, edit_tensors, fused_experts
from tests.model.test_quantization import NOT_LINEAR
from tests.model.test_weights import load_it
from tests.model.weight_formats.groups import Groups, brought_back, in_groups
from tests.support.checkpoints import write_llama
from tests.support.engines import make_request, make_rig
from tests.support.marks import few

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
SIZES = {"qwen3-moe": 8, "gpt-neox": 32, "llama-biases": 32, "phi3": 32, "gpt2": 32, "mixtral": 32, "gemma2": 32}
"""Inputs of a group, by case: 40 columns of an expert are in groups of 8."""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STORED, "groups", Groups)
    monkeypatch.setattr(config_file, "STORED_FORMATS", ("groups",))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("groups"))


def linears(directory: Path) -> list[str]:
    tensors = load_file(directory / "model.safetensors")
    found = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not NOT_LINEAR.search(name)]
    return [name for name in found if "lm_head" not in name and "embed_out" not in name]


def twins(source: Path, root: Path, group: int = 32, lying: bool = False) -> tuple[Path, Path]:
    """The checkpoint in groups, and one with the plain weights that these stand for."""
    grouped, plain = (Path(shutil.copytree(source, root / name)) for name in ("grouped", "plain"))
    names = linears(source)
    assert len(names) >= 4
    in_groups(grouped, names, group, lying, plain=["lm_head", "embed_out"])
    edit_tensors(plain, brought_back(names, group, lying))
    return grouped, plain


def twins_of(case: str, shelf: Shelf, root: Path) -> tuple[Path, Path]:
    return twins(shelf.checkpoint(BY_NAME[case]), root, SIZES[case], lying=case == "gpt2")


def bits(directory: Path, ranks: int, backend: str = "reference") -> list[object]:
    rig = make_rig(directory, 16, 2048, SchedulerSettings(), True, backend=backend, ranks=ranks)
    rig.run({place: make_request(rig, PROMPTS[place], 8) for place in FEW})
    return [(rig.results[place].tokens, rig.logits_of(place)) for place in FEW]


def divided(directory: Path, size: int) -> None:
    """Loads the first rank's part, as far as no other rank is needed."""
    settings = ModelSettings(str(directory), backend="reference", device="cpu")
    load_computer(directory, settings, 4, False, ALONE, Ranks(Shard(0, size)))


@few("ranks", [1, 2], [1])
@pytest.mark.parametrize("case", SIZES)
def test_bits_are_those_of_the_plain_weights(case: str, ranks: int, shelf: Shelf, tmp_path: Path) -> None:
    """Parts of a product apart and fused, gated or not, heads one by one, transposed, experts; divided among ranks."""
    grouped, plain = twins_of(case, shelf, tmp_path)
    assert bits(grouped, ranks) == bits(plain, ranks)


def test_experts_that_are_one_tensor(shelf: Shelf, tmp_path: Path) -> None:
    grouped, plain = twins_of("mixtral", shelf, tmp_path)

    def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`fused_experts`, of tensors whose outputs stand behind."""
        experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        made = {name.replace("block_sparse_moe", "mlp"): t for name, t in tensors.items() if name not in experts}
        for key in ("qweight", "scales"):
            as_plain = {re.sub(f"{key}$", "weight", n): t.T for n, t in experts.items() if n.endswith(key)}
            for name, tensor in fused_experts(as_plain).items():
                made[f"{name}_{key}"] = tensor.transpose(1, 2)
        return made

    edit_tensors(grouped, stacked)
    assert any(name.endswith("experts.gate_up_proj_qweight") for name in Checkpoint(grouped))
    assert bits(grouped, 1) == bits(plain, 1)


@pytest.mark.parametrize("case", SIZES)
def test_the_estimate_is_what_is_held(case: str, shelf: Shelf, tmp_path: Path) -> None:
    grouped, plain = twins_of(case, shelf, tmp_path)
    config = read_config(grouped)
    tensors = Tensors(Checkpoint(grouped), torch.float32, CPU, open_weight_format(config))
    build_model(config, tensors)
    assert tensors.held.bytes == weight_bytes(config, "float32") < weight_bytes(read_config(plain), "float32")
    assert estimate(grouped, ModelSettings(str(grouped)))["quantization"] == "groups"


def test_a_back_end_without_kernels_for_it_says_so(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grouped, _ = twins_of("llama-biases", shelf, tmp_path)
    with caplog.at_level(logging.INFO, "quire.model"):
        assert bits(grouped, 1, "auto") == bits(grouped, 1)
    assert "The CPU's kernels are not used: there are none for weights in the format groups" in caplog.text
    with pytest.raises(ValueError, match="--backend is 'cpu': there are none for weights in the format groups"):
        load_it(grouped, backend="cpu")


def test_degrees_that_would_cut_a_group_are_refused_with_those_that_do_not(shelf: Shelf, tmp_path: Path) -> None:
    """Heads of 16: two to a group."""
    grouped, _ = twins_of("llama-biases", shelf, tmp_path)
    message = (
        "--tensor-parallel is 4: .* 4 heads over 2 .*, groups keeps 1 outputs and 32 inputs together; 1 or 2 can be"
    )
    with pytest.raises(ValueError, match=message):
        divided(grouped, 4)


def test_inner_columns_are_divided_between_groups(tmp_path: Path) -> None:
    """3 groups among 2 ranks; one group cannot be."""
    grouped, plain = twins(write_llama(tmp_path / "source", num_key_value_heads=4), tmp_path)
    assert bits(grouped, 2) == bits(plain, 2)
    narrow, _ = twins(write_llama(tmp_path / "other", intermediate_size=32), tmp_path / "narrow")
    with pytest.raises(ValueError, match="--tensor-parallel is 2: 32 columns in blocks of 32 cannot be divided"):
        divided(narrow, 2)


def test_a_format_is_not_put_into_another(shelf: Shelf, tmp_path: Path) -> None:
    grouped, _ = twins_of("llama-biases", shelf, tmp_path)
    with pytest.raises(ValueError, match=r"--quantization is 'int8': .* in groups already; leave it unset"):
        load_it(grouped, quantization="int8")


def test_parts_of_one_product_in_several_formats_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    grouped, _ = twins_of("llama-biases", shelf, tmp_path)
    options = {"quant_method": "groups", "group_size": 32, "modules_to_not_convert": ["k_proj"]}
    edit_config(grouped, lambda values: values | {"quantization_config": options})
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj groups, self_attn.k_proj plain, self_attn.v_proj g"):
        load_it(grouped)


def test_tensors_of_another_dtype_or_left_over_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    grouped, _ = twins_of("llama-biases", shelf, tmp_path)
    name = "model.layers.1.self_attn.o_proj"
    edit_tensors(grouped, lambda tensors: tensors | {f"{name}.qzeros": torch.zeros(2, 8, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=rf"{name}\.qzeros in model.safetensors is not part of the model"):
        load_it(grouped)
    edit_tensors(grouped, lambda tensors: tensors | {f"{name}.qweight": tensors[f"{name}.qweight"].float()})
    with pytest.raises(CheckpointError, match=rf"{name}\.qweight .* is of torch.float32, must be torch.int32"):
        load_it(grouped)


def test_names_are_known_before_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tuple(ONLINE) == QUANTIZATIONS
    assert tuple(STORED) == STORED_FORMATS


def test_groups_larger_than_a_linear_take_no_more_memory() -> None:
    values = torch.arange(64, dtype=torch.uint8).view(2, 32) & 15
    scales = torch.tensor([[0.5], [2.0]])
    larger, equal = (bring_back(GroupWeights(INT4, values, scales, None, size)) for size in (2**40, 32))
    assert torch.equal(larger, equal)
