"""The contract of a weight format: what a file in this folder implements.

A linear y = x W^T + b is stored as one or several tensors. A format describes them; `model.tensors` reads them and cuts
them by outputs and inputs. One product has queries, keys and values, or gates beside the outputs that they multiply, or
the part of a rank. The cuts are views of mapped files. They go to the format's product, or to a back end's.

A format is opened once for each model that is loaded (`model.weight_formats.registry`), so it may hold what the
products of a model share. `model.weight_formats.plain` is the smallest example.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from model.embedding_table import EightBitRows
from model.layers import Product
from model.weight_formats.stored import StoredTensor, StoredWeight


class MadeProduct(Product, Protocol):
    """A `Product` that knows the memory of its weights."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take on the device, the bias not counted."""


class Blocks(NamedTuple):
    """Outputs and inputs that no cut separates: the least common multiples of a format's `Axis.block`."""

    rows: int = 1
    columns: int = 1


class WeightFormat(Protocol):
    """A way to store linears, and the product that every back end can compute.

    A checkpoint that cannot be served raises CheckpointError, in the constructor where config.json shows it.
    """

    @property
    def name(self) -> str:
        """Name of the format in --quantization or in `quant_method`. Back ends find their own products by it."""

    @property
    def blocks(self) -> Blocks:
        """Blocks that tensor parallelism cuts between.

        A degree that would cut one is refused before weights are read.
        """

    def for_linear(self, name: str) -> "WeightFormat":
        """Returns the format of this linear.

        Self for all, unless the checkpoint stores some in another format (as its output layer in 16 bits). The parts
        of one product, as queries and keys, must have the same, or be `JointFormat`s. Routers are plain, and not asked
        about.

        Args:
            name: Name in the text model, without a suffix: `model.layers.0.mlp.down_proj`.
        """

    def for_tied(self, name: str) -> "WeightFormat":
        """Returns the format of an output layer that is tied to the embedding.

        If it is an `EmbeddingFormat` the embedding is kept in it, also where no output layer is tied to it. Else the
        product gets the embedding as the model has it.

        Args:
            name: Name of the embedding, without a suffix.
        """

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        """Returns what a linear of this size is stored in.

        All of it follows from config.json: `quire estimate` asks without a checkpoint. A tensor that the product does
        not read is described too, since one that is left over stops the start.
        """

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:
        """Returns what one expert of this size is stored in where all experts of a layer are one tensor.

        The shapes are of one expert; the file has a leading dimension more. Empty where the format has no such thing.
        Experts that are saved one by one are linears.
        """

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        """Makes a product with torch: the one of the reference back end, and of each other without kernels for this.

        It runs on any device, and on `meta`, where only `nbytes` counts. A row gets the same bits beside any number of
        others (on a CPU). On a GPU it allocates what it keeps here, and does not synchronise when it is called: it is
        recorded in CUDA graphs. Beside what stays it holds a bounded block of weights in memory, not all of them.

        Args:
            weights: One below the other in the product: their outputs follow each other, their inputs are the same.
            bias: Bias of all outputs, in `dtype`, on `device`.
            dtype: Dtype of the activations.
            device: Device of the activations.
        """


@runtime_checkable
class EmbeddingFormat(WeightFormat, Protocol):
    """A weight format that embeddings of tokens are kept in too."""

    def embedding(self, weight: StoredWeight, device: torch.device) -> EightBitRows:
        """Makes the rows of an embedding, a bounded block of them at a time. On any device, `meta` too."""


@runtime_checkable
class JointFormat(WeightFormat, Protocol):
    """A weight format of some linears, whose product may have parts in other formats of the same model."""

    @property
    def joint(self) -> WeightFormat:
        """The format that makes such products. The same object for all formats that can be parts of one."""
