"""nanoVLM, stated once more: checkpoints under its own names, and what its published source computes, in plain torch
(github.com/huggingface/nanoVLM, models/ and data/, 2025).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor

from tests.model.vision.cases import IMAGE
from tests.support.checkpoints import byte_tokenizer

Config = dict[str, Any]

PLAIN: Config = {
    "vit_hidden_dim": 32, "vit_inter_dim": 48, "vit_patch_size": 4, "vit_img_size": 32, "vit_n_heads": 4,
    "vit_dropout": 0.0, "vit_n_blocks": 3, "vit_ln_eps": 0.02, "vit_cls_flag": False,
    "vit_model_type": "google/siglip-base-patch16-224",
    "lm_hidden_dim": 48, "lm_inter_dim": 80, "lm_rms_eps": 0.02, "lm_re_base": 5000,
    "lm_max_position_embeddings": 512, "lm_vocab_size": IMAGE, "lm_n_heads": 6, "lm_n_kv_heads": 2, "lm_dropout": 0.0,
    "lm_n_blocks": 3, "lm_attn_scaling": 1.25, "lm_max_length": 79, "lm_use_tokens": False, "lm_tie_weights": True,
    "lm_model_type": "HuggingFaceTB/SmolLM2-135M", "lm_tokenizer": "HuggingFaceTB/cosmo2-tokenizer",
    "mp_pixel_shuffle_factor": 2, "vlm_load_backbone_weights": True, "vlm_checkpoint_path": "checkpoints",
}  # fmt: skip
NAMES = {f"r{row}c{column}": f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)}

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""'lm_chat_template', which its tokenizer has."""


def _with(tokens: dict[str, str], **more: Any) -> Config:
    sizes = {
        "lm_base_vocab_size": IMAGE,
        "extra_token_amount": len(tokens),
        "lm_vocab_size": IMAGE + len(tokens),
        "mp_image_token_length": 16,
        "vlm_extra_tokens": tokens,
    }
    return PLAIN | sizes | more


WHOLE = {"image_token": "<|image|>", "global_image_token": "<|global_image|>"}
SQUARE = _with({"image_token": "<|image|>"}, lm_tie_weights=False)
SPLIT = _with({"image_token": "<|image|>"} | NAMES, max_img_size=96)
OVERVIEW = _with(WHOLE | NAMES, max_img_size=128, resize_to_max_side_len=False)
STRETCHED = _with(WHOLE | NAMES, max_img_size=96, resize_to_max_side_len=True)
VERSIONS = {"plain": PLAIN, "square": SQUARE, "split": SPLIT, "overview": OVERVIEW, "stretched": STRETCHED}

SMOLLM_135M: Config = {
    "vit_hidden_dim": 768, "vit_inter_dim": 3072, "vit_patch_size": 16, "vit_img_size": 224, "vit_n_heads": 12,
    "vit_dropout": 0.0, "vit_n_blocks": 12, "vit_ln_eps": 1e-06, "vit_cls_flag": False,
    "vit_model_type": "google/siglip-base-patch16-224",
    "lm_hidden_dim": 576, "lm_inter_dim": 1536, "lm_rms_eps": 1e-05, "lm_re_base": 100000,
    "lm_max_position_embeddings": 8192, "lm_vocab_size": 49152, "lm_n_heads": 9, "lm_n_kv_heads": 3,
    "lm_dropout": 0.0, "lm_n_blocks": 30, "lm_attn_scaling": 1.0, "lm_eos_token_id": 0, "lm_max_length": 79,
    "lm_use_tokens": False, "lm_tie_weights": True, "lm_model_type": "HuggingFaceTB/SmolLM2-135M",
    "lm_tokenizer": "HuggingFaceTB/cosmo2-tokenizer", "mp_pixel_shuffle_factor": 2, "vlm_load_backbone_weights": True,
    "vlm_checkpoint_path": "checkpoints",
}  # fmt: skip


def _smollm_360m(tokens: dict[str, str], **more: Any) -> Config:
    changes: Config = {
        "vit_img_size": 512, "vit_model_type": "google/siglip2-base-patch16-512", "lm_hidden_dim": 960,
        "lm_inter_dim": 2560, "lm_n_heads": 15, "lm_n_kv_heads": 5, "lm_n_blocks": 32, "lm_chat_template": TEMPLATE,
        "lm_base_vocab_size": 49152, "extra_token_amount": len(tokens), "lm_vocab_size": 49152 + len(tokens),
        "mp_pixel_shuffle_factor": 4, "mp_image_token_length": 64, "vlm_extra_tokens": tokens,
        "hf_repo_name": "nanoVLM",
    }  # fmt: skip
    return {key: value for key, value in SMOLLM_135M.items() if key != "lm_eos_token_id"} | changes | more


SMALL_GRID = {key: name for key, name in NAMES.items() if max(map(int, key[1::2])) <= 4}
PUBLISHED = {
    "222M": SMOLLM_135M,
    "450M": _smollm_360m({"image_token": "<|image|>"} | SMALL_GRID, max_img_size=1024),
    "460M-8k": _smollm_360m(WHOLE | NAMES, max_img_size=2048, resize_to_max_side_len=True),
}
"""config.json of lusxvr/nanoVLM-..., as its source would write it for that name: not copied from there."""


def write(directory: Path, config: Config, seed: int = 0, saved: str = "head") -> Path:
    """saved: the name under which tied weights stand."""
    torch.manual_seed(seed)
    tensors = weights(config)
    if config["lm_tie_weights"]:
        tensors = {f"decoder.{saved}.weight": tensors["decoder.token_embedding.weight"]} | {
            name: t
            for name, t in tensors.items()
            if name not in ("decoder.token_embedding.weight", "decoder.head.weight")
        }
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    library = byte_tokenizer()
    while library.get_vocab_size() < IMAGE:
        library.add_tokens([AddedToken(f"<unused{library.get_vocab_size()}>")])
    extra = config.get("vlm_extra_tokens", {})
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in extra.values()])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return directory


def weights(c: Config) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}

    def linear(name: str, out: int, width: int, bias: bool) -> None:
        made[f"{name}.weight"] = torch.randn(out, width) * 1.6 * width**-0.5
        if bias:
            made[f"{name}.bias"] = torch.randn(out) * 0.25

    def norm(name: str, width: int, bias: bool) -> None:
        made[f"{name}.weight"] = torch.rand(width) + 0.5
        if bias:
            made[f"{name}.bias"] = torch.randn(width) * 0.25

    see, width, patch = c["vit_hidden_dim"], c["lm_hidden_dim"], c["vit_patch_size"]
    made["vision_encoder.patch_embedding.conv.weight"] = torch.randn(see, 3, patch, patch) * 0.4
    made["vision_encoder.patch_embedding.conv.bias"] = torch.randn(see) * 0.25
    made["vision_encoder.patch_embedding.position_embedding"] = torch.randn(1, (c["vit_img_size"] // patch) ** 2, see)
    for n in range(c["vit_n_blocks"]):
        block = f"vision_encoder.blocks.{n}"
        norm(f"{block}.ln1", see, True)
        norm(f"{block}.ln2", see, True)
        linear(f"{block}.attn.qkv_proj", 3 * see, see, True)
        linear(f"{block}.attn.out_proj", see, see, True)
        linear(f"{block}.mlp.fc1", c["vit_inter_dim"], see, True)
        linear(f"{block}.mlp.fc2", see, c["vit_inter_dim"], True)
    norm("vision_encoder.layer_norm", see, True)
    linear("MP.proj", width, see * c["mp_pixel_shuffle_factor"] ** 2, False)
    made["decoder.token_embedding.weight"] = torch.randn(c["lm_vocab_size"], width) * 0.5
    head = width // c["lm_n_heads"]
    made["decoder.rotary_embd.inv_freq"] = 1.0 / c["lm_re_base"] ** (torch.arange(0, head, 2).float() / head)
    for n in range(c["lm_n_blocks"]):
        block = f"decoder.blocks.{n}"
        norm(f"{block}.norm1", width, False)
        norm(f"{block}.norm2", width, False)
        for name, out in (("q", width), ("k", head * c["lm_n_kv_heads"]), ("v", head * c["lm_n_kv_heads"])):
            linear(f"{block}.attn.{name}_proj", out, width, False)
        linear(f"{block}.attn.out_proj", width, width, False)
        linear(f"{block}.mlp.gate_proj", c["lm_inter_dim"], width, False)
        linear(f"{block}.mlp.up_proj", c["lm_inter_dim"], width, False)
        linear(f"{block}.mlp.down_proj", width, c["lm_inter_dim"], False)
    norm("decoder.norm", width, False)
    linear("decoder.head", c["lm_vocab_size"], width, False)
    return made


class Reference:
    """w: the tensors of a checkpoint by name."""

    def __init__(self, config: Config, w: dict[str, Tensor]) -> None:
        self.c = config
        tied = w.get("decoder.token_embedding.weight", w.get("decoder.head.weight"))
        assert tied is not None
        self.w = {"decoder.token_embedding.weight": tied, "decoder.head.weight": tied} | w

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], self.c["vit_ln_eps"])

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + self.c["lm_rms_eps"]) * self.w[f"{name}.weight"]

    def features(self, pixels: Tensor) -> Tensor:
        """pixels: float [tiles, 3, side, side] of 0 to 1 -> [tiles x tokens, width]."""
        at, heads = "vision_encoder", self.c["vit_n_heads"]
        x = F.conv2d(
            pixels,
            self.w[f"{at}.patch_embedding.conv.weight"],
            self.w[f"{at}.patch_embedding.conv.bias"],
            stride=self.c["vit_patch_size"],
        )
        x = x.flatten(2).transpose(1, 2) + self.w[f"{at}.patch_embedding.position_embedding"]
        for n in range(self.c["vit_n_blocks"]):
            block = f"{at}.blocks.{n}"
            parts = self.linear(f"{block}.attn.qkv_proj", self.layer_norm(f"{block}.ln1", x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
            scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
            x = x + self.linear(f"{block}.attn.out_proj", (scores @ v).transpose(1, 2).flatten(2))
            up = self.linear(f"{block}.mlp.fc1", self.layer_norm(f"{block}.ln2", x))
            x = x + self.linear(f"{block}.mlp.fc2", F.gelu(up, approximate="tanh"))
        return self.linear("MP.proj", self.shuffled(self.layer_norm(f"{at}.layer_norm", x))).flatten(0, 1)

    def shuffled(self, x: Tensor) -> Tensor:
        """Squares of patches, each the channels of its patches from the upper left to the lower right."""
        factor, side = self.c["mp_pixel_shuffle_factor"], math.isqrt(x.shape[1])
        rows = x.unflatten(1, (side, side))
        squares = [
            torch.cat([rows[:, top + i, left + j] for i in range(factor) for j in range(factor)], -1)
            for top in range(0, side, factor)
            for left in range(0, side, factor)
        ]
        return torch.stack(squares, 1)

    def logits(self, x: Tensor) -> Tensor:
        """x: embeddings [n, width] -> [n, vocabulary]."""
        heads, kv, width = self.c["lm_n_heads"], self.c["lm_n_kv_heads"], self.c["lm_hidden_dim"]
        dim = width // heads
        turns = torch.outer(torch.arange(len(x)).float(), self.w["decoder.rotary_embd.inv_freq"])
        turns = torch.cat([turns, turns], -1)
        cos, sin = turns.cos() * self.c["lm_attn_scaling"], turns.sin() * self.c["lm_attn_scaling"]

        def rotated(t: Tensor) -> Tensor:
            low, high = t.chunk(2, -1)
            return t * cos + torch.cat([-high, low], -1) * sin

        future = torch.ones(len(x), len(x)).triu(1).bool()
        for n in range(self.c["lm_n_blocks"]):
            block = f"decoder.blocks.{n}"
            normal = self.rms_norm(f"{block}.norm1", x)
            q, k, v = (
                self.linear(f"{block}.attn.{name}_proj", normal).view(len(x), -1, dim).transpose(0, 1) for name in "qkv"
            )
            q, k = rotated(q), rotated(k).repeat_interleave(heads // kv, 0)
            scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(future, -math.inf).softmax(-1)
            mixed = (scores @ v.repeat_interleave(heads // kv, 0)).transpose(0, 1).flatten(1)
            x = x + self.linear(f"{block}.attn.out_proj", mixed)
            normal = self.rms_norm(f"{block}.norm2", x)
            gate = F.silu(self.linear(f"{block}.mlp.gate_proj", normal))
            x = x + self.linear(f"{block}.mlp.down_proj", gate * self.linear(f"{block}.mlp.up_proj", normal))
        return self.linear("decoder.head", self.rms_norm("decoder.norm", x))

    def embedded(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(ids), self.w["decoder.token_embedding.weight"])


def tiles(c: Config, image: NDArray[Any]) -> tuple[Tensor, tuple[int, int]]:
    """Returns the tiles of an image as data/processors.py makes them, floats of 0 to 1, and rows and columns."""
    side, picture = c["vit_img_size"], Image.fromarray(image)
    if "max_img_size" not in c:
        return _floats(picture.resize((side, side), Image.Resampling.BILINEAR))[None], (1, 1)
    width, height = picture.size
    long, short, most = max(width, height), min(width, height), c["max_img_size"]
    target = most if c.get("resize_to_max_side_len") else min(most, math.ceil(long / side) * side)
    other = max(math.ceil(short * (target / long) / side) * side, side)
    size = (target, other) if width >= height else (other, target)
    x = _floats(picture.resize(size, Image.Resampling.BICUBIC))
    rows, columns = x.shape[1] // side, x.shape[2] // side
    cut = [
        x[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(rows)
        for column in range(columns)
    ]
    if (rows, columns) != (1, 1) and "global_image_token" in c["vlm_extra_tokens"]:
        whole = F.interpolate(x[None], (side, side), mode="bilinear", align_corners=False, antialias=True)
        cut = [whole[0], *cut]
    return torch.stack(cut), (rows, columns)


def _floats(picture: Image.Image) -> Tensor:
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(
        picture.height, picture.width, 3
    ).permute(2, 0, 1).float() / 255  # fmt: skip


def image_string(c: Config, grids: Sequence[tuple[int, int]]) -> str:
    """Returns the text that get_image_string writes before a text."""
    tokens, one = c["vlm_extra_tokens"], c["vlm_extra_tokens"]["image_token"] * c["mp_image_token_length"]
    written = ""
    for number, (rows, columns) in enumerate(grids):
        if len(grids) > 1:
            written += f"<image: {number}>"
        if "global_image_token" in tokens:
            written += tokens["global_image_token"] + one
            if (rows, columns) == (1, 1):
                continue
        for row in range(rows):
            for column in range(columns):
                written += tokens[f"r{row + 1}c{column + 1}"] + one
    return written
