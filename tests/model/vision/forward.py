"""A whole prompt through a decoder, its images in their places."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import NONE, StateSegments, StepShape
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import EncoderInput, ForwardBatch, ImageEncoder, ImageFeatures
from model.inputs.vision.processed import ProcessedImage
from model.reference.attention_backend import ReferenceAttention
from model.rotary_rows import prompt_positions

PAGE = 16


def features_of(decoder: Decoder, images: Sequence[ProcessedImage]) -> Tensor:
    """[depths, all features, hidden], one image at a time."""
    assert decoder.vision is not None
    with torch.inference_mode():
        return torch.cat([encode(decoder.vision, image) for image in images], 1)


def encode(encoder: ImageEncoder, image: ProcessedImage) -> Tensor:
    """[depths, features, hidden] of one image."""
    (features,) = encoder([EncoderInput(torch.from_numpy(image.pixels), image.grid)])
    return features


def placed(
    decoder: Decoder, config: ModelConfig, ids: Sequence[int], images: Sequence[ProcessedImage]
) -> ImageFeatures | None:
    if not images:
        return None
    assert config.vision is not None
    places = (torch.tensor(ids) == config.vision.image_token_id).nonzero()[:, 0]
    return ImageFeatures(places, features_of(decoder, images))


def logits(
    decoder: Decoder, config: ModelConfig, ids: Sequence[int], images: Sequence[ProcessedImage] = (), chunk: int = 10**9
) -> Tensor:
    """[ids, vocabulary], with the reference back end and causal attention. chunk: most tokens of a step."""
    layout: KVLayout = config.kv_layout(PAGE, "float32")
    pages = -(-len(ids) // PAGE)
    groups, whole = len(layout.groups), placed(decoder, config, ids, images)
    attention = ReferenceAttention(
        layout, pages * groups, config.heads, "float32", torch.device("cpu"), config.scale, config.soft_cap
    )
    table = np.arange(groups * pages, dtype=np.int32).reshape(groups, 1, pages)
    made, everywhere = [], positions_of(config, ids, images)
    for start in range(0, len(ids), chunk):
        positions = np.arange(start, min(start + chunk, len(ids)))
        slices = np.array([[0, start, len(positions)]], np.int32)
        slots, causal = positions + np.arange(groups)[:, None] * pages * PAGE, np.zeros(1, np.int64)
        none, one = np.full((layout.states.pages, 1), NONE, np.int32), np.ones(1, np.int64)
        segments = StateSegments(0 * one, one * len(positions), none, none, np.zeros(1, np.bool_))
        plan = attention.plan(StepShape(slices, positions, slots, table, causal, segments if len(none) else None))
        tokens = torch.tensor(ids)[positions]
        here = everywhere[:, torch.from_numpy(positions)]
        with torch.inference_mode():
            made.append(
                decoder.forward(
                    ForwardBatch(
                        tokens, here, torch.arange(len(tokens)), attention, plan,
                        None if whole is None else part(whole, start, start + len(tokens)),
                    )
                ).logits
            )  # fmt: skip
    return torch.cat(made)


def positions_of(config: ModelConfig, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Tensor:
    """[axes, ids] int64, as `ForwardBatch.positions`."""
    plain = torch.arange(len(ids))[None]
    if config.rotary_axes == 1:
        return plain
    assert config.vision is not None
    free = np.flatnonzero(np.array(ids) == config.vision.image_token_id).astype(np.int32)
    placed_images = []
    for image in images:
        placed_images.append(SimpleNamespace(places=free[: image.tokens], positions=image.positions))
        free = free[image.tokens :]
    made, _ = prompt_positions(len(ids), placed_images, config.rotary_axes)  # type: ignore[arg-type]
    return torch.cat((plain, torch.from_numpy(made)))


def part(images: ImageFeatures, start: int, end: int) -> ImageFeatures | None:
    """Returns the features between these offsets, None without any."""
    inside = (images.places >= start) & (images.places < end)
    return ImageFeatures(images.places[inside] - start, images.features[:, inside]) if inside.any() else None


@dataclass
class BothWays:
    """An attention back end whose tokens all see each other, as those of a PaliGemma's prompt do: scores of one step,
    nothing kept.
    """

    scale: float
    soft_cap: float | None = None
    name: str = "both ways"
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: object) -> None:
        self.kept[layer] = keys, values

    def attend(self, layer: int, queries: Tensor, plan: object, sinks: None = None) -> Tensor:
        keys, values = (
            part.repeat_interleave(queries.shape[1] // part.shape[1], 1).transpose(0, 1) for part in self.kept[layer]
        )
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * self.scale
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        return (scores.softmax(-1) @ values).transpose(0, 1)


def logits_both_ways(
    decoder: Decoder, config: ModelConfig, ids: Sequence[int], images: Sequence[ProcessedImage]
) -> Tensor:
    everything = torch.arange(len(ids))
    with torch.inference_mode():
        return decoder.forward(
            ForwardBatch(
                torch.tensor(ids), everything[None], everything, BothWays(config.scale, config.soft_cap),  # type: ignore[arg-type]
                None, placed(decoder, config, ids, images),
            )
        ).logits  # fmt: skip
