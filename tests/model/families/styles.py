"""The same weights under other names, in more files or beside buffers that old checkpoints saved, and the same config
in older words. Each must give the same tokens.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.families.cases import CASES, CONTEXT, Case
from tests.model.families.classic import Values, classic

Tensors = dict[str, Tensor]


def edit_config(directory: Path, change: Callable[[Values], Values]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2))


def edit_tensors(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, {"format": "pt"})


def renamed(pattern: str, to: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, to, name): tensor for name, tensor in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    """The output layer of a tied model, saved although it is the embedding."""
    (embedding,) = (t for name, t in tensors.items() if re.search(r"(wte|embed_tokens|word_embeddings)\.weight$", name))
    return tensors | {"lm_head.weight": embedding}


def with_buffers(tensors: Tensors) -> Tensors:
    """Causal masks, what is written into them, and rotary frequencies."""
    extra: Tensors = {}
    mask = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
    for name in tensors:
        if match := re.match(r"((?:transformer\.)?h\.\d+\.attn)\.(?:c_attn|k_proj)\.weight", name):
            extra |= {f"{match[1]}.bias": mask, f"{match[1]}.masked_bias": torch.tensor(-1e4)}
        elif match := re.match(r"(gpt_neox\.layers\.\d+\.attention)\.dense\.weight", name):
            extra |= {f"{match[1]}.bias": mask.bool(), f"{match[1]}.masked_bias": torch.tensor(-1e9)}
            extra[f"{match[1]}.rotary_emb.inv_freq"] = torch.ones(2)
        elif match := re.match(r"(model\.layers\.\d+\.self_attn)\.q_proj\.weight", name):
            extra[f"{match[1]}.rotary_emb.inv_freq"] = torch.ones(8)
    assert extra
    return tensors | extra


def fused_experts(tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, as transformers 5 holds them."""
    fused: Tensors = {}
    groups: dict[str, dict[tuple[str, int], Tensor]] = {}
    parts = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for name, tensor in tensors.items():
        if match := re.match(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name):
            groups.setdefault(match[1], {})[parts[match[3]], int(match[2])] = tensor
        else:
            fused[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    assert groups
    for layer, experts in groups.items():
        numbers = sorted({number for _, number in experts})
        both = [torch.cat([experts["gate", n], experts["up", n]]) for n in numbers]
        fused[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        fused[f"{layer}.mlp.experts.down_proj"] = torch.stack([experts["down", n] for n in numbers])
    return fused


def granite_in_transformers_5(tensors: Tensors) -> Tensors:
    """Experts of Granite MoE by the names that transformers 5 has for them, and does not write."""
    for old, new in (("input_linear.weight", "experts.gate_up_proj"), ("output_linear.weight", "experts.down_proj")):
        tensors = renamed(re.escape(old), new)(tensors)
    return renamed(r"router\.layer\.", "router.")(tensors)


def fused_experts_of_lfm2(tensors: Tensors) -> Tensors:
    """As `fused_experts`, by LFM2's names."""
    fused = fused_experts(renamed(r"\.feed_forward\.experts\.", ".mlp.experts.")(tensors))
    return renamed(r"\.mlp\.experts\.", ".feed_forward.experts.")(fused)


def kimi_of_the_hub(tensors: Tensors) -> Tensors:
    """MLPs of layers without experts by their first name, which transformers 5 does not write."""
    return renamed(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.")(tensors)


def kimi_in_transformers_5(tensors: Tensors) -> Tensors:
    """All by the names that transformers 5 has in memory: one convolution, one tensor for all experts of a layer."""
    made = renamed(r"self_attn\.(?=f_a_proj|f_b_proj|dt_bias|A_log)", "self_attn.forget_gate.")(fused_experts(tensors))
    for name in [name for name in made if name.endswith("q_conv1d.weight")]:
        parts = [made.pop(name.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        made[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return made


def fused_experts_of_nemotron(tensors: Tensors) -> Tensors:
    """As `fused_experts`, of experts without gates."""
    made: Tensors = {}
    groups: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            groups.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            made[name] = tensor
    assert groups
    return made | {name: torch.stack([parts[n] for n in sorted(parts)]) for name, parts in groups.items()}


def su(values: Values) -> Values:
    """Phi-3's first word for longrope."""
    old = classic(values)
    return old | {"rope_scaling": old["rope_scaling"] | {"type": "su"}}


def sharded(tensors: Tensors) -> Iterator[Tensors]:
    """Three files, each layer spread over them."""
    names = sorted(tensors)
    for i in range(3):
        yield {name: tensors[name].contiguous() for name in names[i::3]}


def inside_another(directory: Path) -> None:
    """A text model as a part of one that sees, whose encoder is there too."""

    def nested(values: Values) -> Values:
        outer = {key: values[key] for key in ("eos_token_id", "tie_word_embeddings", "dtype")}
        return outer | {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": values,
            "vision_config": {"model_type": "llama4_vision_model"},
        }  # fmt: skip

    def beside(tensors: Tensors) -> Tensors:
        encoder = {
            "vision_model.class_embedding": torch.ones(8),
            "multi_modal_projector.linear_1.weight": torch.ones(8, 8),
        }
        return renamed("^", "language_model.")(tensors) | encoder

    edit_config(directory, nested)
    edit_tensors(directory, beside)


def shard(directory: Path) -> None:
    whole = directory / "model.safetensors"
    where: dict[str, str] = {}
    for i, part in enumerate(sharded(load_file(whole)), 1):
        file = f"model-{i:05}-of-00003.safetensors"
        save_file(part, directory / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    whole.unlink()


@dataclass(frozen=True, eq=False)
class Style:
    """cases: names of those that are also tried this way. rewrite: a checkpoint, in place."""

    name: str
    covers: str
    cases: tuple[str, ...]
    rewrite: Callable[[Path], None]

    def copy(self, directory: Path, to: Path) -> Path:
        shutil.copytree(directory, to, dirs_exist_ok=True)
        self.rewrite(to)
        return to


def _tensors(name: str, covers: str, cases: str, change: Callable[[Tensors], Tensors]) -> Style:
    return Style(name, covers, tuple(cases.split()), lambda directory: edit_tensors(directory, change))


CLASSIC = "config.json in the Hub's classic words"
STYLES = (
    Style("classic", CLASSIC, tuple(case.name for case in CASES), lambda directory: edit_config(directory, classic)),
    Style("su", "longrope by its first name", ("phi3-longrope",), lambda directory: edit_config(directory, su)),
    Style("inside", "the text model of one with images", ("llama4", "llama4-dense"), inside_another),
    Style("sharded", "three files", ("llama", "qwen3-moe", "gemma3", "gpt2", "opt-post-norm", "falcon"), shard),
    _tensors(
        "head", "a tied model's output layer saved too",
        "llama-tied qwen2-window gemma gemma2 gemma3 gpt2 opt opt-post-norm phi3-partial starcoder2 falcon falcon-new",
        with_head,
    ),
    _tensors("buffers", "masks and frequencies of old checkpoints", "llama gpt2 gpt-neox gptj", with_buffers),
    _tensors("fused", "one tensor for all experts of a layer", "mixtral qwen2-moe qwen3-moe qwen3-moe-mixed minimax-m2",
             fused_experts),
    _tensors("fused", "one tensor for all experts of a layer", "ernie4.5-moe",
             lambda tensors: renamed(r"\.moe_statics\.", ".gate.moe_statics.")(fused_experts(tensors))),
    _tensors("renamed", "experts as transformers 5 names them", "granite-moe",
             granite_in_transformers_5),
    _tensors("fused", "one tensor for all experts of a layer", "phimoe",
             lambda tensors: renamed(r"\.gate\.weight$", ".router.weight")(fused_experts(tensors))),
    _tensors("renamed", "the body under the name that the Hub's have", "nemotron-h nemotron-h-moe",
             renamed(r"^(model|backbone)\.", "backbone.")),
    _tensors("renamed", "the body under the name of transformers 5", "nemotron-h nemotron-h-moe",
             renamed(r"^(model|backbone)\.", "model.")),
    _tensors("fused", "one tensor for all experts of a layer", "lfm2-moe", fused_experts_of_lfm2),
    _tensors("fused", "one tensor for all experts of a layer", "nemotron-h-moe", fused_experts_of_nemotron),
    _tensors("renamed", "MLPs under the name that the Hub's have", "kimi-linear kimi-linear-plain", kimi_of_the_hub),
    _tensors("fused", "names of transformers 5, one tensor for all experts of a layer", "kimi-linear",
             kimi_in_transformers_5),
    _tensors("bare", "names without the outer module's", "gpt2", renamed(r"^transformer\.", "")),
    _tensors("bare", "names without the outer module's", "opt opt-post-norm",
             renamed(r"^model\.decoder\.", "decoder.")),
    _tensors("bare, buffers", "the first GPT-2's file", "gpt2-inner",
             lambda tensors: with_buffers(renamed(r"^transformer\.", "")(tensors))),
)  # fmt: skip

STYLED: tuple[tuple[Case, Style], ...] = tuple(
    (case, style) for style in STYLES for case in CASES if case.name in style.cases
)
