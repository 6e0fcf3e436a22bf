"""Writes GGUF files of tiny checkpoints with the gguf package, and the plain checkpoints that these stand for.

The changes that convert_hf_to_gguf.py of llama.cpp makes to tensors are stated here once more, in numpy.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.model.families.styles import edit_config, edit_tensors
from tests.model.gguf.apart import Apart, find_apart, tiled
from tests.model.gguf.keys import divisors_of_gemma4, fold_factors
from tests.model.gguf.kinds import Kinds, encoded
from tests.model.gguf.metadata import first_of, heads_of, write_config

Array = NDArray[Any]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
    "Starcoder2ForCausalLM": "starcoder2",
    "Olmo2ForCausalLM": "olmo2",
    "FalconForCausalLM": "falcon",
    "GPTNeoXForCausalLM": "gptneox",
    "PhiForCausalLM": "phi2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "GraniteForCausalLM": "granite",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "StableLmForCausalLM": "stablelm",
    "Glm4ForCausalLM": "glm4",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Glm4MoeForCausalLM": "glm4moe",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "PhimoeForCausalLM": "phimoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Mamba2ForCausalLM": "mamba2",
    "FalconH1ForCausalLM": "falcon-h1",
    "KimiLinearForCausalLM": "kimi-linear",
    "Llama4ForCausalLM": "llama4",
    "BloomForCausalLM": "bloom",
    "MptForCausalLM": "mpt",
    "NemotronHForCausalLM": "nemotron_h",
}
SCALES_OF_GEMMA4 = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
PAIRED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
STATE_SPACE = ("falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def paired(data: Array, heads: int) -> Array:
    """Rows of each head so that those that rotate together are neighbours."""
    return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def apart(data: Array, heads: int, kv_heads: int) -> Array:
    """Falcon: all queries, all keys, all values."""
    grouped = data.reshape(kv_heads, heads // kv_heads + 2, -1, *data.shape[1:])
    parts = (grouped[:, :-2], grouped[:, [-2]], grouped[:, [-1]])
    return np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])


class Conversion:
    """One checkpoint on its way. meant: the numbers that the file stands for, by the checkpoint's names."""

    def __init__(self, directory: Path, kinds: Kinds) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.architecture = ARCHITECTURES[self.config["architectures"][0]]
        if self.architecture == "nemotron_h" and "moe" in self.config["layers_block_type"]:
            self.architecture = "nemotron_h_moe"
        self.tensors = {
            name: tensor.float().numpy() for name, tensor in load_file(directory / "model.safetensors").items()
        }
        if self.architecture == "falcon-h1":
            fold_factors(self.config, self.tensors)
        self.vocabulary = json.loads((directory / "tokenizer.json").read_text())
        self.meant: dict[str, torch.Tensor] = {}
        self.stored: dict[str, tuple[Array, Kind]] = {}
        self._whole: dict[str, tuple[str, Apart]] = {}
        self._parts: dict[str, list[Array]] = {}
        self.layers = first_of(self.config, "num_hidden_layers", "n_layer", "n_layers") or len(
            self.config["layers_block_type"]
        )
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(arch, self.layers)
        for name, data in self._stacked().items():
            spelled = name.replace("correction_bias", "correction.bias").replace(".sinks", ".sinks.weight")
            spelled = spelled.replace(".dt_bias", ".dt_proj.bias").replace(".layer_scalar", ".layer_scalar.weight")
            if self.architecture == "bloom":
                spelled = spelled.removeprefix("transformer.")
            spelled = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", spelled)
            spelled = re.sub(r"(?<=\.experts\.)(gate_up_proj|down_proj)$", r"\1.weight", spelled)
            there = SCALES_OF_GEMMA4.get(name.split(".", 3)[-1]) if self.architecture == "gemma4" else None
            if there is not None:
                there = f"blk.{name.split('.')[2]}.{there}"
            spelled = spelled.replace(".expert_bias", ".expert_bias.bias")
            if self.architecture == "lfm2moe":
                spelled = re.sub(r"^model\.(?=layers\.\d+\.feed_forward\.experts)", "", spelled)
            spelled = re.sub(r"^backbone(\.layers\.\d+\.)mixer\.experts", r"model\1mlp.experts", spelled)
            if self.architecture == "granitehybrid" and not self.config["num_local_experts"]:
                spelled = re.sub(r"(mlp\.shared_experts|shared_mlp)\.", "mlp.", spelled).replace(
                    "output_linear", "down_proj"
                )
            there = there or names.get_name(spelled, (".weight", ".bias"))
            assert there is not None, name
            plain = (
                data.ndim == 1
                or there.endswith((".bias", "ssm_a"))
                or any(part in there for part in ("norm", "ffn_gate_inp", "conv1d", "shortconv.conv"))
            )
            kind = Kind.F32 if plain else kinds(there)
            raw, numbers = encoded(there, np.ascontiguousarray(self._changed(name, data)), kind)
            self.stored[there] = raw, kind
            self._mean(name, self._back(name, numbers))

    def _stacked(self) -> Mapping[str, Array]:
        """Experts of a layer as one tensor."""
        tensors: dict[str, Any] = {}
        for name, data in self.tensors.items():
            if name.endswith("kv_b_proj.weight"):
                by_head = data.reshape(self.config["num_attention_heads"], -1, data.shape[1])
                plain = self.config["qk_nope_head_dim"]
                tensors[name.replace("kv_b", "k_b")] = by_head[:, :plain].swapaxes(1, 2)
                tensors[name.replace("kv_b", "v_b")] = by_head[:, plain:]
            elif apart := find_apart(self.architecture, name):
                parts = apart.parts(self.config, name, data)
                self._whole |= dict.fromkeys(parts, (name, apart))
                tensors |= parts
            elif match := EXPERT.fullmatch(name):
                tensors.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = data
            else:
                tensors[name] = data
        return {n: np.stack([d[i] for i in sorted(d)]) if isinstance(d, dict) else d for n, d in tensors.items()}

    def _mean(self, name: str, numbers: Array) -> None:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        if name in self.tensors:
            self.meant[name] = tensor
            return
        if name in self._whole:
            whole, apart = self._whole[name]
            parts = self._parts.setdefault(whole, [])
            parts.append(numbers)
            if len(parts) == len(apart.names):
                self.meant[whole] = torch.from_numpy(np.ascontiguousarray(apart.join(self.config, parts)))
            return
        if name.endswith("_b_proj.weight"):  # of each head its keys, lying, or its values, which come later
            keys = [numbers.swapaxes(1, 2)] if ".k_b" in name else [self._keys, numbers]
            self._keys = keys[0]
            whole = np.concatenate(keys, 1).reshape(-1, numbers.shape[2] if len(keys) > 1 else numbers.shape[1])
            self.meant[name.replace(".k_b", ".kv_b").replace(".v_b", ".kv_b")] = torch.from_numpy(whole)
            return
        prefix, part = name.removesuffix(".weight").rsplit(".", 1)
        self.meant |= {f"{prefix}.{i}.{part}.weight": one for i, one in enumerate(tensor)}

    def _tiled(self, name: str) -> bool:
        return self.architecture.startswith("qwen35") and "linear_attn." in name and ".norm." not in name

    def _changed(self, name: str, data: Array) -> Array:
        if self._tiled(name):
            data = tiled(self.config, name, data)
        heads, kv_heads = heads_of(self.config, self.architecture)
        if self.architecture in PAIRED and (found := re.search(r"\.([qk])_proj\.", name)):
            return paired(data, heads if found[1] == "q" else kv_heads)
        if self._adds_one(name):
            return data + np.float32(1)
        if name.endswith("A_log"):
            rates = -torch.exp(torch.from_numpy(data)).numpy()
            return rates[:, None] if self.architecture in STATE_SPACE else rates
        if re.search(r"conv(1d|\.conv)\.weight", name):
            return data[None] if self.architecture == "kimi-linear" else data[:, 0]
        if self._in_columns(name):
            groups = first_of(self.config, "mamba_n_groups", "n_groups")
            return data.reshape(groups, -1) if "norm" in name else data[:, None]
        if self._lies(name):
            return data.T
        return apart(data, heads, kv_heads) if "query_key_value" in name else data

    def _back(self, name: str, data: Array) -> Array:
        if self._tiled(name):
            data = tiled(self.config, name, data, back=True)
        heads, kv_heads = heads_of(self.config, self.architecture)
        if self.architecture in PAIRED and (found := re.search(r"\.([qk])_proj\.", name)):
            count = heads if found[1] == "q" else kv_heads
            return data.reshape(count, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if name.endswith("A_log"):
            return self.tensors[name]
        if re.search(r"conv(1d|\.conv)\.weight", name):
            return data.reshape(-1, 1, data.shape[-1])
        if self._in_columns(name):
            return data.flatten()
        if self._adds_one(name):
            return data - np.float32(1)
        if self._lies(name):
            return data.T
        if "query_key_value" in name:
            order = np.empty(len(data), np.int64)
            order[apart(np.arange(len(data)), heads, kv_heads)] = np.arange(len(data))
            return data[order]
        return data

    def _in_columns(self, name: str) -> bool:
        """Whether a vector of a state-space mixer is written in two dimensions."""
        return self.architecture in STATE_SPACE and bool(re.search(r"(mixer|mamba)\.(D|norm\.weight)$", name))

    def _adds_one(self, name: str) -> bool:
        if self.architecture == "gemma4":
            return False
        offset = self.architecture.startswith(("gemma", "qwen3next", "qwen35"))
        return offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")

    def _lies(self, name: str) -> bool:
        return self.architecture == "gpt2" and bool(re.search(r"(c_attn|c_proj|c_fc)\.weight", name))

    def write(self, path: Path, more: Callable[[GGUFWriter], None] | None = None, parts: int = 0) -> None:
        """more: writes further metadata. parts: tensors a file; 0 for one file."""
        writer = GGUFWriter(None if parts else path, self.architecture, split_max_tensors=parts)
        write_config(self.config, writer, self.layers, self.tensors)
        self._write_tokenizer(writer)
        for name, factors in self.factors().items():
            writer.add_tensor(name, factors)
        if more is not None:
            more(writer)
        for name, (raw, kind) in self.stored.items():
            writer.add_tensor(name, raw, raw_dtype=kind)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def factors(self) -> dict[str, Array]:
        """Divisors of rotary frequencies, by the names of their tensors."""
        rope = self.config.get("rope_parameters") or {}
        if self.architecture == "gemma4":
            return {"rope_freqs.weight": divisors_of_gemma4(self.config)}
        if rope.get("rope_type") == "longrope":
            return {f"rope_factors_{k}.weight": np.float32(rope[f"{k}_factor"]) for k in ("long", "short")}
        if rope.get("rope_type") != "llama3":
            return {}
        dims = self.config["hidden_size"] // self.config["num_attention_heads"]
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        with np.errstate(divide="ignore"):  # Llama 4 has one bound
            smooth = ((turns / (2 * np.pi) - low) / (high - low)).clip(0, 1)
        return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}

    def _write_tokenizer(self, w: GGUFWriter) -> None:
        model = self.vocabulary["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        added = {token["content"] for token in self.vocabulary["added_tokens"]}
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        kinds = [TokenType.CONTROL if token in added else TokenType.NORMAL for token in tokens]
        unused = [f"[PAD{i}]" for i in range(len(tokens), self.config["vocab_size"])]
        w.add_token_list([*tokens, *unused])
        w.add_token_types([*kinds, *[TokenType.UNUSED] * len(unused)])
        w.add_token_merges([" ".join(merge) for merge in model["merges"]])
        w.add_eos_token_id(0)


def convert(directory: Path, path: Path, kinds: Kinds, **options: Any) -> Path:
    """Writes a checkpoint as a GGUF file, and the plain checkpoint that this stands for. Returns the latter."""
    made = Conversion(directory, kinds)
    made.write(path, **options)
    plain = Path(shutil.copytree(directory, path.with_suffix(".plain")))
    edit_tensors(plain, lambda tensors: tensors | made.meant)
    if made.architecture == "falcon-h1":
        edit_config(plain, lambda _: made.config)
    if made.architecture != "gemma4" and (factors := made.factors().get("rope_freqs.weight")) is not None:
        rope = {"rope_type": "longrope", "short_factor": factors.tolist(), "attention_factor": 1.0}
        theta = made.config["rope_parameters"]["rope_theta"]
        edit_config(plain, lambda values: values | {"rope_parameters": rope | {"rope_theta": theta}})
    return plain
