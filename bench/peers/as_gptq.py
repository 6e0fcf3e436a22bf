"""Writes a plain checkpoint as a GPTQ one, in 8 bits, symmetric, by nearest rounding.

The layout is that of `pack` in GPTQModel's gptqmodel/nn_modules/qlinear, zero points less 1 as its first format has
them. Output layers and embeddings stay as they are.

python -m bench.peers.as_gptq MODEL OUT
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUPS = (128, 64, 32)  # sizes; the largest that divides the inputs of all linears is taken
ZERO = 128


def convert(model: Path, out: Path) -> None:
    """Writes the GPTQ checkpoint of a directory."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    linears = [name for name, tensor in tensors.items() if ".layers." in name and tensor.ndim == 2]
    group = next(size for size in GROUPS if not any(tensors[name].shape[1] % size for name in linears))
    made = {name: tensor for name, tensor in tensors.items() if name not in linears}
    for name in linears:
        packed = pack(tensors[name].float(), group)
        made |= {f"{name.removesuffix('.weight')}.{key}": tensor for key, tensor in packed.items()}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": 8, "group_size": group, "sym": True, "desc_act": False, "lm_head": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    save_file(made, out / "model.safetensors")


def pack(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Quantizes and packs a weight.

    Args:
        weight: [out, in] float32.
        group: Inputs of a group.

    Returns:
        `qweight` [in / 4, out] int32, `qzeros` [groups, out / 4] int32, `scales` [groups, out] float16, `g_idx` [in].
    """
    out, width = weight.shape
    parts = weight.reshape(out, width // group, group)
    scales = (parts.abs().amax(2) * (2 / 255)).clamp(min=1e-4).half()
    values = (parts / scales.float()[:, :, None]).round().add(ZERO).clamp(0, 255).to(torch.uint8)
    zeros = torch.full((width // group, out), ZERO - 1, dtype=torch.uint8)
    return {
        "qweight": values.reshape(out, width).view(torch.int32).T.contiguous(),
        "qzeros": zeros.view(torch.int32),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(width) // group).int(),
    }


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
