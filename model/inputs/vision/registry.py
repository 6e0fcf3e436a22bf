"""Which images and prompts which model takes."""

import re
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.errors import CheckpointError
from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.nano import NanoTiles
from model.inputs.vision.processor import CLIP_MEAN, CLIP_STD, HALF, read_normalisation, read_processor
from model.inputs.vision.prompts import ImagesFirst, Leading, NanoStrings, Prompt, Repeated, TiledStrings
from model.inputs.vision.single import is_siglip, read_single_tile
from model.inputs.vision.split import read_split_tiles, tile_side
from model.inputs.vision.tiles import UNIT, Normalisation
from model.multimodal import LLAVA, NANO, PALIGEMMA, Vision

NAME = re.compile(r"r(\d+)c(\d+)")


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What is read of a model that sees."""

    directory: Path
    tokenizer: Tokenizer
    config: ModelConfig
    vision: Vision

    def token(self, token: int) -> str:
        text = self.tokenizer.text_of(token)
        if text is None:
            raise CheckpointError(f"{self.directory / 'tokenizer.json'} has no token {token}, which config.json names")
        return text


def read_image_inputs(directory: Path, config: ModelConfig, tokenizer: Tokenizer) -> ImageInputs | None:
    """None for a model of text alone. Raises CheckpointError."""
    if config.vision is None:
        return None
    checkpoint = _Checkpoint(directory, tokenizer, config, config.vision)
    if config.architecture == NANO:
        return _nano(checkpoint)
    if config.architecture == PALIGEMMA:
        beginning = config.vision.fields.get("bos_token_id", int, config.fields.get("bos_token_id", int, 2))
        return _single(
            checkpoint, config.vision.tower.patches, ImagesFirst(_marker(checkpoint), checkpoint.token(beginning))
        )
    if config.architecture == LLAVA:
        return _single(checkpoint, llava_features(config.vision), Repeated(_marker(checkpoint)))
    processor = read_processor(directory)
    tokens = split_features(config.vision, tile_side(processor))
    return ImageInputs(
        read_split_tiles(processor, tokens), TiledStrings(_marker(checkpoint)), config.vision.image_token_id, tokens
    )


def read_image_normalisation(directory: Path, config: ModelConfig) -> Normalisation:
    """Of a model that sees. Raises CheckpointError."""
    if config.architecture == NANO:
        return UNIT
    fields = read_processor(directory)
    if config.architecture == LLAVA and not is_siglip(fields):
        return read_normalisation(fields, CLIP_MEAN, CLIP_STD)
    return read_normalisation(fields, HALF, HALF)


def llava_features(vision: Vision) -> int:
    """Of one image. Raises CheckpointError."""
    strategy = vision.fields.get("vision_feature_select_strategy", str, "default")
    if strategy not in ("default", "full"):
        raise vision.fields.refuse("vision_feature_select_strategy", "must be 'default' or 'full'")
    first = 1 if vision.tower.kind == "clip_vision_model" else 0
    return vision.tower.patches + first - (1 if strategy == "default" else 0)


def split_features(vision: Vision, side: int) -> int:
    """Of a tile of so many pixels squared, for a connector that takes squares of patches together.

    Raises CheckpointError.
    """
    factor, across = vision.fields.positive("scale_factor", 2), side // vision.tower.patch
    return shuffled_features(vision.fields.path, across, factor)


def shuffled_features(path: Path, across: int, factor: int) -> int:
    if across < factor or across % factor:
        raise CheckpointError(f"{path}: squares of {factor} patches do not divide tiles of {across} x {across} patches")
    return (across // factor) ** 2


def _marker(checkpoint: _Checkpoint) -> str:
    return checkpoint.token(checkpoint.vision.image_token_id)


def _single(checkpoint: _Checkpoint, tokens: int, prompt: Prompt) -> ImageInputs:
    vision = checkpoint.vision
    tile = read_single_tile(read_processor(checkpoint.directory), vision.tower.image, tokens)
    return ImageInputs(tile, prompt, vision.image_token_id, tokens)


def _nano(checkpoint: _Checkpoint) -> ImageInputs:
    vision, fields = checkpoint.vision, checkpoint.vision.fields
    factor, across = fields.positive("mp_pixel_shuffle_factor"), vision.tower.image // vision.tower.patch
    tokens = shuffled_features(fields.path, across, factor)
    if fields.positive("mp_image_token_length", tokens) != tokens:
        raise fields.refuse("mp_image_token_length", f"but a tile has {tokens} features")
    extra = fields.section("vlm_extra_tokens")
    if "image_token" not in extra:
        return ImageInputs(NanoTiles(tokens, vision.tower.image), Leading(), vision.image_token_id, tokens)
    marker = extra.get("image_token", str)
    if _marker(checkpoint) != marker:
        raise extra.refuse("image_token", "but tokenizer.json has no such token")
    longest = fields.positive("max_img_size") if "max_img_size" in fields else None
    if longest is not None and longest % vision.tower.image:
        raise fields.refuse("max_img_size", f"must be a multiple of 'vit_img_size', which is {vision.tower.image}")
    overview = extra.get("global_image_token", str) if "global_image_token" in extra else None
    names = {(int(m[1]), int(m[2])): extra.get(key, str) for key in extra.values if (m := NAME.fullmatch(key))}
    tiles = NanoTiles(
        tokens, vision.tower.image, longest, fields.flag("resize_to_max_side_len"), overview=overview is not None
    )
    return ImageInputs(tiles, NanoStrings(marker, longest is not None, overview, names), vision.image_token_id, tokens)
