"""Loads the image encoder of nanoVLM: SigLIP's, under names of its own (github.com/huggingface/nanoVLM)."""

from model.config import ModelConfig
from model.inputs.vision.processed import Normalisation
from model.multimodal import Vision
from model.tensors import Tensors
from model.vision.encoder import ShuffledProjector, VisionEncoder
from model.vision.tower import EncoderLayer, Tower, TowerAttention
from model.vision.towers import activation_of, load_mlp, make_patches, norm, patch_projection


def load_nano_encoder(
    config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation
) -> VisionEncoder:
    """Loads the encoder and its connector.

    Raises:
        CheckpointError: A tensor or a field is missing or wrong.
    """
    shape, at = vision.tower, tensors.under("vision_encoder.")

    def layer(number: int) -> EncoderLayer:
        of = at.under(f"blocks.{number}.")
        return EncoderLayer(
            norm(shape, of, "ln1"),
            TowerAttention(
                shape.heads,
                of.linear("attn.qkv_proj", shape.hidden, 3 * shape.hidden, bias=True),
                of.linear("attn.out_proj", shape.hidden, shape.hidden, bias=True),
            ),
            norm(shape, of, "ln2"),
            load_mlp(shape, of, activation_of(shape.activation)),
        )

    positions = at("patch_embedding.position_embedding", 1, shape.patches, shape.hidden)[0]
    projection = patch_projection(shape, at, "patch_embedding.conv", bias=True)
    tower = Tower(
        make_patches(shape, normalisation, projection, positions),
        [layer(number) for number in range(shape.layers)],
        (shape.layers,),
        after=norm(shape, at, "layer_norm"),
    )
    factor = vision.fields.positive("mp_pixel_shuffle_factor")
    return VisionEncoder(
        tower, ShuffledProjector(factor, tensors.linear("MP.proj", factor**2 * shape.hidden, config.hidden))
    )
