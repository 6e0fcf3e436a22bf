"""Loads a checkpoint's image encoder, under the names of transformers 5 or of the Hub's older checkpoints.

A missing or superfluous tensor is an error, as for text.
"""

from collections.abc import Callable

from model.config import ModelConfig
from model.forward import ImageEncoder
from model.gemma4_vision import GEMMA4
from model.inputs.vision.processed import Normalisation
from model.inputs.vision.processor import read_processor
from model.inputs.vision.registry import read_image_normalisation
from model.inputs.vision.split import tile_side
from model.layers import read_activation
from model.multimodal import IDEFICS3, LLAVA, NANO, PALIGEMMA, SMOLVLM, Vision
from model.qwen_vl import QWEN
from model.tensors import Tensors
from model.vision.encoder import MLPProjector, Projector, ShuffledProjector, VisionEncoder
from model.vision.gemma4_loading import load_gemma4_encoder
from model.vision.nano import load_nano_encoder
from model.vision.qwen import load_qwen_encoder
from model.vision.towers import load_tower

PATCHES = "embeddings.patch_embedding.weight"
TOWERS = ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model.", "vision_tower.")


def load_encoder(config: ModelConfig, tensors: Tensors) -> ImageEncoder | None:
    """Loads the image encoder and its connector. None for a model of text alone, or whose images are not served.

    Args:
        config: The model.
        tensors: Tensors of the whole checkpoint.

    Raises:
        CheckpointError: A tensor or a field is missing or wrong.
    """
    if config.vision is None:
        return None
    normalisation = read_image_normalisation(config.fields.path.parent, config)
    return LOADERS[config.architecture](config, config.vision, tensors, normalisation)


def _paligemma(config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation) -> VisionEncoder:
    at = tensors.under_any(TOWERS, PATCHES)
    tower = load_tower(vision.tower, at, normalisation)
    projector = tensors.under_any(("model.multi_modal_projector.", "multi_modal_projector."), "linear.weight")
    return VisionEncoder(tower, Projector(projector.linear("linear", vision.tower.hidden, config.hidden, bias=True)))


def _llava(config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation) -> VisionEncoder:
    fields, taps = vision.fields, feature_layers(vision)
    at = tensors.under_any(TOWERS, PATCHES)
    tower = load_tower(vision.tower, at, normalisation, taps)
    projector = tensors.under_any(("model.multi_modal_projector.", "multi_modal_projector."), "linear_1.weight")
    bias = fields.flag("multimodal_projector_bias", True)
    connector = MLPProjector(
        projector.linear("linear_1", vision.tower.hidden * len(taps), config.hidden, bias),
        projector.linear("linear_2", config.hidden, config.hidden, bias),
        read_activation(fields, "projector_hidden_act", "gelu"),
        skipped=1 if fields.get("vision_feature_select_strategy", str, "default") == "default" else 0,
    )
    return VisionEncoder(tower, connector)


def feature_layers(vision: Vision) -> tuple[int, ...]:
    """Returns the numbers of layers after which LLaVA reads its features. Those of several layers stand side by side.

    Raises:
        CheckpointError: 'vision_feature_layer' names other layers.
    """
    fields, layers = vision.fields, vision.tower.layers
    said = fields.values.get("vision_feature_layer", -2)
    numbers = said if isinstance(said, list) else [said]
    taps = [n + layers + 1 if isinstance(n, int) and n < 0 else n for n in numbers]
    if not taps or not all(isinstance(tap, int) and 0 <= tap <= layers for tap in taps):
        raise fields.refuse("vision_feature_layer", f"must name some of the encoder's {layers} layers")
    return tuple(taps)


def _idefics3(config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation) -> VisionEncoder:
    factor, width = vision.fields.positive("scale_factor", 2), vision.tower.hidden
    across = tile_side(read_processor(config.fields.path.parent)) // vision.tower.patch
    at = tensors.under_any(("model.vision_model.", "vision_model."), PATCHES)
    tower = load_tower(vision.tower, at, normalisation, across=across)
    connector = tensors.under_any(("model.connector.", "connector."), "modality_projection.proj.weight")
    projection = connector.linear("modality_projection.proj", factor**2 * width, config.hidden)
    return VisionEncoder(tower, ShuffledProjector(factor, projection))


Load = Callable[[ModelConfig, Vision, Tensors, Normalisation], ImageEncoder | None]
LOADERS: dict[str, Load] = {
    PALIGEMMA: _paligemma,
    LLAVA: _llava,
    IDEFICS3: _idefics3,
    SMOLVLM: _idefics3,
    NANO: load_nano_encoder,
    GEMMA4: load_gemma4_encoder,
    **dict.fromkeys(QWEN, load_qwen_encoder),
}
