"""Finds the names that tensors of a GGUF file have on the Hugging Face hub. Imports no torch."""

import re
from collections.abc import Iterator, Mapping

from model.errors import CheckpointError
from model.gguf.name_tables import NAMES
from model.gguf.named import Change, Named, Names
from model.gguf.reader import MOST_TENSORS, TensorInfo

WHOLE = re.compile(r"blk\.(\d{1,4})\.([\w.]+)")
IN_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
PREDICTOR = re.compile(r"blk\.(\d{1,4})\.(nextn\.\w+\.weight)")  # of further tokens
EXPERT = re.compile(r"blk\.(\d{1,4})\.(ffn_(?:gate|up|down))\.(\d{1,4})\.(weight)")  # as older files have them
OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
GATES_WITH_UPS = "ffn_gate_up_exps"  # as llama.cpp's converter writes them where it is asked to
READ_BY_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}  # Falcon 40B and later


def hub_names(architecture: str, tensors: Mapping[str, TensorInfo]) -> Iterator[Named]:
    """Yields a model's tensors under their names on the hub.

    A tensor that the architecture does not know keeps its own name.

    Raises:
        CheckpointError: Two tensors are one on the hub, or experts make more of them than a checkpoint may have.
    """
    names, found = NAMES[architecture], dict[str, str]()
    block = dict(names.block)
    if architecture == "FalconForCausalLM" and "blk.0.attn_norm_2.weight" in tensors:
        block |= TWO_NORMS
    for tensor in tensors.values():
        if tensor.name in READ_BY_CONFIG:
            continue
        for one in _named(names, block, tensor):
            if one.name in found:
                raise CheckpointError(f"{tensor.file.path}: {found[one.name]} and {tensor.name} are both {one.name}")
            found[one.name] = tensor.name
            if len(found) > MOST_TENSORS:
                raise CheckpointError(f"{tensor.file.path} has more than {MOST_TENSORS} tensors, each expert's counted")
            yield one


def _named(names: Names, block: Mapping[str, str], tensor: TensorInfo) -> Iterator[Named]:
    if (found := OUTSIDE.fullmatch(tensor.name)) and found[1] in names.top:
        yield Named(f"{names.top[found[1]]}.{found[2]}", tensor, names.changes.get(found[1], Change.NONE))
    elif (found := WHOLE.fullmatch(tensor.name)) and found[2] in names.whole:
        change = names.changes.get(found[2].removesuffix(".weight").removesuffix(".bias"), Change.NONE)
        yield Named(f"{names.layers.format(int(found[1]))}{names.whole[found[2]]}", tensor, change)
    elif (found := IN_BLOCK.fullmatch(tensor.name)) and found[2] in block:
        change = names.changes.get(found[2], Change.NONE)
        if change is Change.LYING and found[3] == "bias":
            change = Change.NONE
        yield Named(f"{names.layers.format(int(found[1]))}{block[found[2]]}.{found[3]}", tensor, change)
    elif found and found[2] == GATES_WITH_UPS and found[2] not in names.experts and _has_halves(tensor, found[3]):
        yield from _halves(names, tensor, int(found[1]), found[3])
    elif found and found[2] in names.experts and len(tensor.shape) == (3 if found[3] == "weight" else 2):
        prefix, part = names.layers.format(int(found[1])), names.experts[found[2]]
        for expert in range(tensor.shape[0]):
            yield Named(f"{prefix}{part.format(expert)}.{found[3]}", tensor, expert=expert)
    elif (found := EXPERT.fullmatch(tensor.name)) and f"{found[2]}_exps" in names.experts:
        part = names.experts[f"{found[2]}_exps"].format(int(found[3]))
        yield Named(f"{names.layers.format(int(found[1]))}{part}.{found[4]}", tensor)
    elif found := PREDICTOR.fullmatch(tensor.name):
        yield Named(f"{names.layers.format(int(found[1]))}{found[2]}", tensor)
    else:
        yield Named(tensor.name, tensor)


def _has_halves(tensor: TensorInfo, end: str) -> bool:
    """Returns whether a tensor is of experts whose rows, or biases, are those of two products."""
    dimensions = 3 if end == "weight" else 2
    return len(tensor.shape) == dimensions and tensor.shape[1] % 2 == 0 and (end == "weight" or tensor.type.is_plain)


def _halves(names: Names, tensor: TensorInfo, layer: int, end: str) -> Iterator[Named]:
    """Yields the gate and up products of experts, which one tensor has: of each expert first the gate's rows."""
    for half, part in enumerate(("ffn_gate_exps", "ffn_up_exps")):
        if part not in names.experts:
            yield Named(tensor.name, tensor)
            return
        for expert in range(tensor.shape[0]):
            name = f"{names.layers.format(layer)}{names.experts[part].format(expert)}.{end}"
            yield Named(name, tensor, expert=expert, half=half)
