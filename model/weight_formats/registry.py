"""Chooses the weight format of a model: the one of its checkpoint, or the one that a setting names."""

from collections.abc import Callable

from model.config import ModelConfig
from model.fields import Fields
from model.gguf.config import METHOD
from model.weight_formats.awq import AwqFormat
from model.weight_formats.compressed_tensors import CompressedTensors
from model.weight_formats.format import WeightFormat
from model.weight_formats.fp8 import Fp8
from model.weight_formats.gguf import GGUFFormat
from model.weight_formats.gptq import GptqFormat
from model.weight_formats.int4 import Int4Format
from model.weight_formats.int8 import Int8Format
from model.weight_formats.mxfp4 import Mxfp4
from model.weight_formats.plain import PLAIN

ONLINE: dict[str, Callable[[], WeightFormat]] = {"int8": Int8Format, "int4": Int4Format}
"""Formats that are made from plain weights at load; `model.settings.QUANTIZATIONS` has the same names."""

STORED: dict[str, Callable[[Fields], WeightFormat]] = {
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": GptqFormat,
    "mxfp4": Mxfp4,
}
"""Formats by `quant_method`, made of 'quantization_config'; `model.config.STORED_FORMATS` has the same names."""

FILES: dict[str, Callable[[Fields], WeightFormat]] = {METHOD: GGUFFormat}
"""Formats of files that are no model directory, whose config `model.config` makes."""


def open_weight_format(config: ModelConfig, quantization: str | None = None) -> WeightFormat:
    """Opens the format of a model that is about to be loaded.

    Args:
        config: Result of `read_config`, which refuses checkpoints in other formats.
        quantization: Value of --quantization.

    Raises:
        CheckpointError: The format cannot be served with these options of config.json.
        ValueError: Weights that are stored in a format are to be put into another one.
    """
    if config.quantization is None:
        return PLAIN if quantization is None else ONLINE[quantization]()
    stored = config.stored_format
    if quantization is not None:
        raise ValueError(
            f"--quantization is {quantization!r}: the checkpoint's weights are in {stored} already; leave it unset"
        )
    return (STORED | FILES)[stored](config.quantization)
