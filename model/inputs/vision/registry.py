"""Reads the image inputs of each architecture."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.errors import CheckpointError
from model.gemma4_vision import BEGIN, END, GEMMA4, read_pooled_shape, vision_fields
from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.any_resolution import read_any_resolution
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.nano import NanoTiles
from model.inputs.vision.patch_budget import read_centred, read_patch_budget
from model.inputs.vision.processed import UNIT, Normalisation
from model.inputs.vision.processor import CLIP_MEAN, CLIP_STD, HALF, read_normalisation, read_processor
from model.inputs.vision.prompts import Enclosed, ImagesFirst, Leading, NanoStrings, Prompt, Repeated, TiledStrings
from model.inputs.vision.single import is_siglip, read_single_tile
from model.inputs.vision.split import read_split_tiles, tile_side
from model.multimodal import IDEFICS3, LLAVA, NANO, PALIGEMMA, SMOLVLM, Vision
from model.qwen_vl import QWEN, read_grid_shape

log = logging.getLogger("quire.model")
NAME = re.compile(r"r(\d+)c(\d+)")


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """A vision-language model, as far as its image inputs depend on it."""

    directory: Path
    tokenizer: Tokenizer
    config: ModelConfig
    vision: Vision

    @property
    def marker(self) -> str:
        """The placeholder's text."""
        return self.token(self.vision.image_token_id)

    def token(self, token: int) -> str:
        text = self.tokenizer.text_of(token)
        if text is None:
            raise CheckpointError(f"{self.directory / 'tokenizer.json'} has no token {token}, which config.json names")
        return text


def read_image_inputs(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> ImageInputs | None:
    """Reads a model's image inputs. None for a model of text alone, or whose images are not served.

    Raises:
        CheckpointError: Its files do not say how it takes images, or contradict one another.
    """
    if config.vision is None:
        return None
    if config.vision.unserved:
        log.warning("Images are not served: %s. Prompts of text are.", config.vision.unserved)
        return None
    return READERS[config.architecture](VisionCheckpoint(directory, tokenizer, config, config.vision))


def read_image_normalisation(directory: Path, config: ModelConfig) -> Normalisation:
    """Reads the normalisation of a vision-language model's pixels.

    Raises:
        CheckpointError: The processor's settings are missing or wrong.
    """
    if config.architecture == NANO:
        return UNIT
    if config.vision is not None and config.vision.unserved:
        return UNIT
    fields = read_processor(directory)
    if config.architecture == GEMMA4:
        return read_centred(fields)
    if config.architecture in QWEN or (config.architecture == LLAVA and not is_siglip(fields)):
        return read_normalisation(fields, CLIP_MEAN, CLIP_STD)
    return read_normalisation(fields, HALF, HALF)


def llava_features(vision: Vision) -> int:
    """Returns LLaVA's number of features of an image.

    Raises:
        CheckpointError: 'vision_feature_select_strategy' is not supported.
    """
    strategy = vision.fields.get("vision_feature_select_strategy", str, "default")
    if strategy not in ("default", "full"):
        raise vision.fields.refuse("vision_feature_select_strategy", "must be 'default' or 'full'")
    first = 1 if vision.tower.kind == "clip_vision_model" else 0
    return vision.tower.patches + first - (1 if strategy == "default" else 0)


def split_features(vision: Vision, side: int) -> int:
    """Returns the number of features of a tile, for a connector that joins squares of patches.

    Args:
        vision: The vision part of the model.
        side: Side of the tile in pixels.

    Raises:
        CheckpointError: Squares do not divide the tile.
    """
    factor, across = vision.fields.positive("scale_factor", 2), side // vision.tower.patch
    return shuffled_features(vision.fields.path, across, factor)


def shuffled_features(path: Path, across: int, factor: int) -> int:
    if across < factor or across % factor:
        raise CheckpointError(f"{path}: squares of {factor} patches do not divide tiles of {across} x {across} patches")
    return (across // factor) ** 2


def _paligemma(checkpoint: VisionCheckpoint) -> ImageInputs:
    config, vision = checkpoint.config, checkpoint.vision
    beginning = vision.fields.get("bos_token_id", int, config.fields.get("bos_token_id", int, 2))
    prompt = ImagesFirst(checkpoint.marker, checkpoint.token(beginning))
    return _single(checkpoint, vision.tower.patches, prompt)


def _llava(checkpoint: VisionCheckpoint) -> ImageInputs:
    return _single(checkpoint, llava_features(checkpoint.vision), Repeated(checkpoint.marker))


def _idefics3(checkpoint: VisionCheckpoint) -> ImageInputs:
    processor, vision = read_processor(checkpoint.directory), checkpoint.vision
    tiles = read_split_tiles(processor, split_features(vision, tile_side(processor)))
    return ImageInputs(tiles, TiledStrings(checkpoint.marker), vision.image_token_id)


def _single(checkpoint: VisionCheckpoint, tokens: int, prompt: Prompt) -> ImageInputs:
    vision = checkpoint.vision
    tile = read_single_tile(read_processor(checkpoint.directory), vision.tower.image, tokens)
    return ImageInputs(tile, prompt, vision.image_token_id)


def _nano(checkpoint: VisionCheckpoint) -> ImageInputs:
    vision, fields = checkpoint.vision, checkpoint.vision.fields
    factor, across = fields.positive("mp_pixel_shuffle_factor"), vision.tower.image // vision.tower.patch
    tokens = shuffled_features(fields.path, across, factor)
    if fields.positive("mp_image_token_length", tokens) != tokens:
        raise fields.refuse("mp_image_token_length", f"but a tile has {tokens} features")
    extra = fields.section("vlm_extra_tokens")
    if "image_token" not in extra:
        return ImageInputs(NanoTiles(tokens, vision.tower.image), Leading(), vision.image_token_id)
    marker = extra.get("image_token", str)
    if checkpoint.marker != marker:
        raise extra.refuse("image_token", "but tokenizer.json has no such token")
    longest = fields.positive("max_img_size") if "max_img_size" in fields else None
    if longest is not None and longest % vision.tower.image:
        raise fields.refuse("max_img_size", f"must be a multiple of 'vit_img_size', which is {vision.tower.image}")
    overview = extra.get("global_image_token", str) if "global_image_token" in extra else None
    names = {(int(m[1]), int(m[2])): extra.get(key, str) for key in extra.values if (m := NAME.fullmatch(key))}
    tiles = NanoTiles(
        tokens, vision.tower.image, longest, fields.flag("resize_to_max_side_len"), overview=overview is not None
    )
    return ImageInputs(tiles, NanoStrings(marker, longest is not None, overview, names), vision.image_token_id)


def _qwen(checkpoint: VisionCheckpoint) -> ImageInputs:
    config, vision = checkpoint.config, checkpoint.vision
    grid = read_grid_shape(vision.fields, config.architecture, vision.tower)
    process = read_any_resolution(read_processor(checkpoint.directory), vision.tower.patch, grid.merge, grid.frames)
    return ImageInputs(process, Repeated(checkpoint.marker), vision.image_token_id)


def _gemma4(checkpoint: VisionCheckpoint) -> ImageInputs:
    vision, fields = checkpoint.vision, checkpoint.vision.fields
    own = read_pooled_shape(fields)
    process = read_patch_budget(read_processor(checkpoint.directory), vision.tower.patch, own.side)
    most = process.features * own.side
    if most > own.places:
        raise vision_fields(fields).refuse("position_embedding_size", f"an image may have {most} patches in a row")
    before = checkpoint.token(fields.get("boi_token_id", int, BEGIN))
    after = checkpoint.token(fields.get("eoi_token_id", int, END))
    return ImageInputs(process, Enclosed(checkpoint.marker, before, after), vision.image_token_id)


READERS: dict[str, Callable[[VisionCheckpoint], ImageInputs]] = {
    PALIGEMMA: _paligemma,
    LLAVA: _llava,
    IDEFICS3: _idefics3,
    SMOLVLM: _idefics3,
    NANO: _nano,
    GEMMA4: _gemma4,
    **dict.fromkeys(QWEN, _qwen),
}
