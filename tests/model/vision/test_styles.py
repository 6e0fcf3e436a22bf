"""Law: how a checkpoint is written down changes no logit, and every tensor of it is accounted for."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import read_config
from model.errors import CheckpointError
from tests.model.families.styles import Tensors, edit_tensors, renamed
from tests.model.vision import forward
from tests.model.vision.cases import BY_NAME, CASES, GRIDS, QWEN, Case
from tests.model.vision.conftest import Shelf, load_decoder
from tests.model.vision.pictures import picture

pytestmark = pytest.mark.sample(3)


def both(*changes: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """One renaming after the other."""

    def change(tensors: Tensors) -> Tensors:
        for pattern, to in changes:
            tensors = renamed(pattern, to)(tensors)
        return tensors

    return change


def with_head(tensors: Tensors) -> Tensors:
    """The output layer of a tied model, saved although it is the embedding."""
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = "language_model.lm_head.weight" if name.startswith("language_model.") else "lm_head.weight"
    return tensors | {head: tensors[name]}


def with_buffers(tensors: Tensors) -> Tensors:
    """Rotary frequencies and numbers of positions."""
    extra: Tensors = {}
    for name in tensors:
        if match := re.match(r"(.*)\.q_proj\.weight", name):
            if "vision" not in name:
                extra[f"{match[1]}.rotary_emb.inv_freq"] = torch.ones(8)
        elif match := re.match(r"(.*)\.position_embedding\.weight", name):
            extra[f"{match[1]}.position_ids"] = torch.arange(16)[None]
    assert len(extra) > 1
    return tensors | extra


def with_experts_turned(tensors: Tensors) -> Tensors:
    """Experts as transformers 4 saved those of Qwen3-VL."""
    return {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in tensors.items()}


INSIDE = (r"^vision_tower\.", "vision_tower.vision_model.")
OUTSIDE = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
BESIDE = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
TILED = [case for case in CASES if case.kind not in GRIDS]
LLAVA_LIKE = [case for case in CASES if case.name.startswith(("llava", "paligemma"))]
IDEFICS_LIKE = [case for case in TILED if case not in LLAVA_LIKE]
TIED = [BY_NAME[name] for name in ("paligemma", "llava-pad", "smolvlm")]
STYLED: list[tuple[Case, str, Callable[[Tensors], Tensors]]] = [
    *((case, "the Hub's", both(INSIDE)) for case in LLAVA_LIKE),
    *((case, "transformers 5's", both(*OUTSIDE)) for case in LLAVA_LIKE),
    *((case, "transformers 4.52's", both(INSIDE, *OUTSIDE)) for case in LLAVA_LIKE),
    *((case, "a head", with_head) for case in TIED),
    *((case, "buffers", with_buffers) for case in TILED if case.name != "llava-siglip"),
    *((BY_NAME[name], "transformers 4's", both(*BESIDE)) for name in ("qwen2-vl", "qwen2.5-vl")),
    (BY_NAME["qwen3-vl-moe"], "experts as [in, out]", with_experts_turned),
]


def copied(shelf: Shelf, case: Case, to: Path) -> Path:
    shutil.copytree(shelf.checkpoint(case), to, dirs_exist_ok=True)
    return to


def one_prompt(shelf: Shelf, case: Case, directory: Path) -> Tensor:
    tiles = [shelf.inputs(case).process(picture(40, 70))]
    ids = shelf.inputs(case).encode("the <image> cat", tiles, shelf.tokenizer(case))
    return forward.logits(load_decoder(directory), read_config(directory), ids, tiles)


@pytest.mark.parametrize(("case", "change"), [(c, f) for c, _, f in STYLED], ids=[f"{c}: {n}" for c, n, _ in STYLED])
def test_names_change_nothing(case: Case, change: Callable[[Tensors], Tensors], shelf: Shelf, tmp_path: Path) -> None:
    directory = copied(shelf, case, tmp_path)
    edit_tensors(directory, change)
    assert torch.equal(one_prompt(shelf, case, directory), one_prompt(shelf, case, shelf.checkpoint(case)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
def test_a_missing_tensor_is_named(case: Case, shelf: Shelf, tmp_path: Path) -> None:
    """One of each kind that the model uses."""
    directory = copied(shelf, case, tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    kinds: dict[str, str] = {}
    for name in sorted(tensors):
        kinds.setdefault(re.sub(r"\.\d+\.", ".", name), name)
    unused = ("head.", "post_layernorm") if case.name.startswith("llava") else ()
    for name in kinds.values():
        if not any(f"vision_tower.{part}" in name for part in unused):
            save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
            with pytest.raises(CheckpointError, match=r"missing|stands under none of"):
                load_decoder(directory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tensor_too_many_is_named(case: Case, shelf: Shelf, tmp_path: Path) -> None:
    directory = copied(shelf, case, tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if case.kind in QWEN:
        layers = "model.visual.blocks"
    elif case.kind in GRIDS:
        layers = "model.vision_tower.encoder.layers"
    else:
        patch = next(name for name in tensors if name.endswith("patch_embedding.weight"))
        layers = patch.removesuffix("embeddings.patch_embedding.weight") + "encoder.layers"
    for name in (f"{layers}.0.self_attn.q_norm.bias", f"{layers}.9.mlp.fc1.bias", "other"):
        save_file(tensors | {name: torch.zeros(3)}, path)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            load_decoder(directory)


def test_another_shape_is_named(shelf: Shelf, tmp_path: Path) -> None:
    directory = copied(shelf, BY_NAME["smolvlm"], tmp_path)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"scale_factor": 2}))
    with pytest.raises(CheckpointError, match=r"modality_projection\.proj\.weight .* has shape \[64, 512\]"):
        load_decoder(directory)
