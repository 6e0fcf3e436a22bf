"""The tensors of a GGUF file under the names, and in the order, that they have on the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.gguf.named import Change, Named
from model.gguf.names import hub_names
from model.gguf.split import is_gguf, open_model
from model.recurrent import DeltaShape
from model.weight_formats.gguf import groups_of
from model.weight_formats.groups import blocks_of, bring_back
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from model.weight_formats.tiles import HeadTiles
from model.weights import Checkpoint

TILED = (Change.TILED, Change.TILED_INPUTS, Change.TILED_AFTER_KEYS, Change.TILED_CHANNELS)
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint(Checkpoint):
    """`Checkpoint` of a GGUF file or its parts, which are mapped.

    Weights in blocks are given as bytes where the reader asks for them, as numbers otherwise.
    """

    described = "its metadata"

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        finite: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Opens the files.

        Args:
            path: The file, or the first of them.
            config: Result of `read_config`.
            finite: See `Checkpoint`.
            progress: See `Checkpoint`.

        Raises:
            CheckpointError: The files are damaged.
        """
        self._config = config
        tensors = open_model(path).tensors
        self._named = {one.name: one for one in hub_names(config.architecture, tensors)}
        files = {name: one.tensor.file.path for name, one in self._named.items()}
        self._begin(path, files, finite, progress)

    def _read(self, name: str, dtype: torch.dtype | None, stored: torch.dtype | None) -> tuple[Tensor, bool]:
        one = self._named[name]
        data, kind = torch.from_numpy(one.tensor.bytes()), one.tensor.type
        if one.expert is not None:
            data = data[one.expert]
        if one.half is not None:
            data = data.chunk(2)[one.half]
        copied = False
        if kind.is_plain:
            tensor = data.view(PLAIN_DTYPES[kind.name])
        elif stored is not None:
            tensor = data
        else:
            numbers = _numbers(one, data.reshape(-1, data.shape[-1]), dtype or torch.float32)
            tensor, copied = numbers.view(*data.shape[:-1], -1), True
        changed = self._changed(one, tensor)
        return changed, copied or changed.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()

    def _numbers(self, name: str, tensor: Tensor, stored: torch.dtype | None) -> Tensor:
        one = self._named[name]
        return tensor if stored is None else _numbers(one, tensor.T if one.change is Change.LYING else tensor)

    def _shown(self, name: str) -> str:
        one = self._named.get(name)
        return name if one is None or one.tensor.name == name else f"{name} ({one.tensor.name})"

    def _changed(self, one: Named, tensor: Tensor) -> Tensor:
        """Undoes what the file's writer changed."""
        c = self._config
        if one.change is Change.PLUS_ONE:
            return tensor.float() - 1.0
        if one.change is Change.CHANNELS:
            return tensor if tensor.ndim == 1 else tensor.reshape(-1, 1, tensor.shape[-1])
        if one.change is Change.IN_COLUMNS:
            return tensor.flatten()
        if one.change in TILED:
            return self._heads_together(one.change, tensor)
        if one.change is Change.FLAT:
            return tensor.view(1, -1)
        if one.change is Change.LYING:
            return tensor.T if tensor.ndim == 2 else tensor
        if one.change is Change.PAIRED_QUERIES:
            return _halves(tensor, c.heads)
        if one.change is Change.PAIRED_KEYS:
            return _halves(tensor, c.kv_heads)
        if one.change is Change.QKV_APART:
            return _by_heads(tensor, c.heads, c.kv_heads)
        return tensor

    def _heads_together(self, change: Change, tensor: Tensor) -> Tensor:
        """Puts value heads that share a key head beside each other. Tensors of another shape are left to the reader."""
        shape = next(one for one in self._config.recurrent if isinstance(one, DeltaShape))
        tiles = HeadTiles(shape.key_heads, shape.heads // shape.key_heads, shape.value_dim)
        if change is Change.TILED_INPUTS:  # blocks are put in order by their format
            is_plain = tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape[1] == tiles.width
            return tiles.together(tensor, 1) if is_plain else tensor
        first = 0 if change is Change.TILED else 2 * shape.keys
        rest = len(tensor) - first
        if rest > 0 and rest % (tiles.key_heads * tiles.each) == 0:
            tensor = torch.cat((tensor[:first], tiles.together(tensor[first:], 0)))
        return tensor.unsqueeze(1) if change is Change.TILED_CHANNELS else tensor


def open_checkpoint(
    location: Path, config: ModelConfig, finite: bool = False, progress: Callable[[int], object] | None = None
) -> Checkpoint:
    """Opens the weights of a model directory or a GGUF file; arguments and errors as `GGUFCheckpoint`."""
    if is_gguf(location):
        return GGUFCheckpoint(location, config, finite, progress)
    return Checkpoint(location, finite, progress)


def _numbers(one: Named, data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes the weights that blocks stand for, some outputs at a time. Returns [out, in]."""
    kind = one.tensor.type
    out, width = len(data), one.tensor.shape[-1]
    described = (StoredTensor(kind.name, tuple(data.shape), torch.uint8, Axis(0), Axis(1, kind.block, kind.size)),)
    made, start = torch.empty(out, width, dtype=dtype), 0
    for block in blocks_of(StoredWeight(one.name, out, width, described, {kind.name: data})):
        made[start : start + block.outputs] = bring_back(groups_of(block))
        start += block.outputs
    return made


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Puts rows of each head in the order of halves; they are stored in that of pairs that rotate together."""
    if len(tensor) % (2 * heads):
        return tensor  # the shape is another one than the model's, which the reader says
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_heads(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Puts rows in groups of heads: the queries that share a key, the key, the value."""
    if len(tensor) % (heads + 2 * kv_heads):
        return tensor
    split = tensor.unflatten(0, (heads + 2 * kv_heads, -1))
    queries, keys, values = split.split((heads, kv_heads, kv_heads))
    grouped = queries.unflatten(0, (kv_heads, -1))
    return torch.cat((grouped, keys[:, None], values[:, None]), 1).flatten(0, 2)
