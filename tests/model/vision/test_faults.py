"""Mistakes that could be made with images, planted: the comparison with transformers catches each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import read_config
from model.decoder import Decoder, Embedding
from model.forward import ForwardBatch
from model.inputs.vision.processed import ProcessedImage
from model.layers import gelu, quick_gelu
from model.vision.encoder import MLPProjector, ShuffledProjector, VisionEncoder
from model.vision.gemma4 import Clipped, PooledEncoder
from model.vision.grid_tower import GridEncoder, LearnedPlaces
from model.vision.tower import Tower
from tests.model.vision import forward, reference
from tests.model.vision.cases import BY_NAME, Case
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import picture
from tests.model.vision.test_encoders import near

pytestmark = pytest.mark.sample(3)

PROMPT, IMAGE = "the <image> cat", picture(50, 90)


@dataclass(frozen=True, eq=False)
class Fault:
    name: str
    case: str
    decoder: Callable[[Decoder], Decoder] = lambda decoder: decoder
    tiles: Callable[[ProcessedImage], ProcessedImage] = lambda tiles: tiles

    def __str__(self) -> str:
        return f"{self.case}: {self.name}"


def agrees(
    shelf: Shelf, case: Case, decoder: Decoder, change: Callable[[ProcessedImage], ProcessedImage] = lambda tiles: tiles
) -> bool:
    config, inputs = read_config(shelf.checkpoint(case)), shelf.inputs(case)
    tiles = [inputs.process(IMAGE)]
    ids = inputs.encode(PROMPT, tiles, shelf.tokenizer(case))
    values = reference.inputs(shelf.processor(case), PROMPT, [IMAGE])
    logits = forward.logits_both_ways if case.name.startswith("paligemma") else forward.logits
    ours = logits(decoder, config, ids, [change(t) for t in tiles])
    return near(ours, reference.logits(shelf.reference(case), case, values), 1e-4)


def encoder(change: Callable[[VisionEncoder], VisionEncoder]) -> Callable[[Decoder], Decoder]:
    def faulty(decoder: Decoder) -> Decoder:
        assert decoder.vision is not None
        return replace(decoder, vision=change(decoder.vision))

    return faulty


def tower(**values: Any) -> Callable[[Decoder], Decoder]:
    """Its tower is another; values that are called are given the old one."""

    def change(vision: VisionEncoder) -> VisionEncoder:
        given = {name: value(vision.tower) if callable(value) else value for name, value in values.items()}
        return replace(vision, tower=replace(vision.tower, **given))

    return encoder(change)


def features(change: Callable[[Tensor], Tensor]) -> Callable[[Decoder], Decoder]:
    return encoder(lambda vision: replace(vision, connector=lambda x: change(vision.connector(x))))


def seen(change: Callable[[Tensor, ShuffledProjector], Tensor]) -> Callable[[Decoder], Decoder]:
    """The pixel shuffle gets other features."""

    def faulty(vision: VisionEncoder) -> VisionEncoder:
        old = vision.connector
        assert isinstance(old, ShuffledProjector)
        return replace(vision, connector=lambda x: change(x, old))

    return encoder(faulty)


def columns_first(x: Tensor, shuffle: ShuffledProjector) -> Tensor:
    """Channels of a square's patches in the wrong order."""
    tiles, patches, width = x.shape
    across = math.isqrt(patches) // shuffle.factor
    x = x.view(tiles, across, shuffle.factor, across, shuffle.factor, width).permute(0, 1, 3, 4, 2, 5)
    return shuffle.linear(x.reshape(-1, shuffle.factor**2 * width))


def transposed(x: Tensor, shuffle: ShuffledProjector) -> Tensor:
    """Squares column by column."""
    across = math.isqrt(x.shape[1]) // shuffle.factor
    return shuffle(x).unflatten(0, (-1, across, across)).transpose(1, 2).flatten(0, 2)


def rows_apart(x: Tensor, shuffle: ShuffledProjector) -> Tensor:
    """Runs of patches in one row instead of squares."""
    return shuffle.linear(x.reshape(-1, shuffle.factor**2 * x.shape[-1]))


class ScaledAfter:
    """Features go in before the embedding is scaled."""

    def __init__(self, old: Embedding) -> None:
        self.old = old

    def __call__(self, batch: ForwardBatch) -> Tensor:
        x = replace(self.old, scale=None)(batch)
        return x * (self.old.scale or 1.0)


def scaled_after(decoder: Decoder) -> Decoder:
    return replace(decoder, embedding=ScaledAfter(decoder.embedding))  # type: ignore[arg-type]


def reordered(order: Callable[[int, int], list[int]]) -> Callable[[ProcessedImage], ProcessedImage]:
    return lambda tiles: replace(tiles, pixels=tiles.pixels[order(tiles.rows, tiles.columns)].copy())


def by_column(rows: int, columns: int) -> list[int]:
    return [row * columns + column for column in range(columns) for row in range(rows)] + [rows * columns]


def whole_first(rows: int, columns: int) -> list[int]:
    return [rows * columns, *range(rows * columns)]


def flipped(pixels: Callable[[Any], Any]) -> Callable[[ProcessedImage], ProcessedImage]:
    return lambda tiles: replace(tiles, pixels=pixels(tiles.pixels).copy())


def patches(**values: Any) -> Callable[[Decoder], Decoder]:
    def other(old: Tower) -> Any:
        given = {name: value(getattr(old.patches, name)) for name, value in values.items()}
        return replace(old.patches, **given)

    return tower(patches=other)


def activation(decoder: Decoder) -> Decoder:
    other = quick_gelu if decoder.vision is not None and decoder.vision.tower.before is None else gelu
    return tower(layers=lambda old: [replace(layer, mlp=replace(layer.mlp, activation=other)) for layer in old.layers])(
        decoder
    )


def heads(decoder: Decoder) -> Decoder:
    return tower(
        layers=lambda old: [replace(layer, attention=replace(layer.attention, heads=2)) for layer in old.layers]
    )(decoder)


def last_kept(vision: VisionEncoder) -> VisionEncoder:
    """The last patch is left out instead of the vector that is none."""
    old = vision.connector
    assert isinstance(old, MLPProjector)
    return replace(vision, connector=lambda x: replace(old, skipped=0)(x[:, :-1]))


def grid(change: Callable[[GridEncoder], GridEncoder]) -> Callable[[Decoder], Decoder]:
    def faulty(decoder: Decoder) -> Decoder:
        assert isinstance(decoder.vision, GridEncoder)
        return replace(decoder, vision=change(decoder.vision))

    return faulty


def pooled(change: Callable[[PooledEncoder], PooledEncoder]) -> Callable[[Decoder], Decoder]:
    def faulty(decoder: Decoder) -> Decoder:
        assert isinstance(decoder.vision, PooledEncoder)
        return replace(decoder, vision=change(decoder.vision))

    return faulty


def unbounded(old: PooledEncoder) -> PooledEncoder:
    """Queries of the first layer have no bounds."""
    first = old.layers[0]
    assert isinstance(first.attention.queries, Clipped)
    plain = replace(first.attention, queries=first.attention.queries.product)
    return replace(old, layers=[replace(first, attention=plain), *old.layers[1:]])


def windowed(where: Callable[[int], bool]) -> Callable[[Decoder], Decoder]:
    """Other layers of the encoder have windows."""
    return grid(
        lambda old: replace(old, layers=[replace(layer, windowed=where(i)) for i, layer in enumerate(old.layers)])
    )


def merged(change: Callable[[Tensor], Tensor]) -> Callable[[Decoder], Decoder]:
    """The merger gets other patches."""
    return grid(lambda old: replace(old, merger=lambda x: old.merger(change(x))))


def turned(axes: Callable[[tuple[int, ...]], list[int]]) -> Callable[[Decoder], Decoder]:
    """The text model's pairs turn by other axes."""

    def faulty(decoder: Decoder) -> Decoder:
        layers: list[Any] = list(decoder.layers)
        rope = layers[0].attention.rope
        other = rope.with_axes(axes(rope.axes))
        return replace(decoder, layers=[replace(one, attention=replace(one.attention, rope=other)) for one in layers])

    return faulty


def by_row_of_squares(x: Tensor) -> Tensor:
    """A square's patches are those of a row."""
    return x.unflatten(0, (-1, 2, 2)).transpose(0, 1).flatten(0, 2)


class OtherPlaces:
    """Learned positions of places that are turned around."""

    def __init__(self, old: LearnedPlaces) -> None:
        self.old = old

    def __call__(self, places: Tensor, size: tuple[int, int]) -> Tensor:
        return self.old(places.flip(0), size[::-1])


FAULTS = (
    Fault("one layer too many read", "llava-clip", tower(taps=(2,))),
    Fault("the other of two layers first", "llava-layers", tower(taps=lambda old: old.taps[::-1])),
    Fault("a norm after the layers", "llava-siglip", tower(after=lambda _: lambda x: x / x.std(-1, keepdim=True))),
    Fault("no norm before the layers", "llava-clip", tower(before=None)),
    Fault("no norm after the layers", "paligemma", tower(after=None)),
    Fault("no norm after the layers", "smolvlm", tower(after=None)),
    Fault("no norm after the layers", "idefics3", tower(after=None)),
    Fault("the last patch left out", "llava-clip", encoder(last_kept)),
    Fault("columns before rows in a square", "idefics3", seen(columns_first)),
    Fault("squares column by column", "smolvlm", seen(transposed)),
    Fault("runs instead of squares", "idefics3-positions", seen(rows_apart)),
    Fault("features scaled as embeddings", "paligemma", features(lambda x: x * 64**0.5)),
    Fault("features scaled against embeddings", "paligemma2", features(lambda x: x / 64**0.5)),
    Fault("merged before the scale", "paligemma", scaled_after),
    Fault("tiles column by column", "idefics3", tiles=reordered(by_column)),
    Fault("the whole image first", "smolvlm", tiles=reordered(whole_first)),
    Fault("colours reversed", "llava-clip", tiles=flipped(lambda p: p[:, ::-1])),
    Fault("upside down", "paligemma", tiles=flipped(lambda p: p[:, :, ::-1])),
    Fault("rows as columns", "smolvlm-whole", tiles=flipped(lambda p: p.swapaxes(2, 3))),
    Fault("a mean for all colours", "llava-clip", patches(mean=lambda mean: mean.mean().expand(3, 1, 1))),
    Fault("not divided by 255", "llava-siglip", patches(factor=lambda _: 1 / 256)),
    Fault("positions column by column", "paligemma",
          patches(positions=lambda p: p.unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1))),
    Fault("positions from the upper left", "idefics3-positions", patches(positions=lambda p: p.roll(1, 0))),
    Fault("another activation", "llava-clip", activation),
    Fault("another activation", "smolvlm", activation),
    Fault("two heads for four", "idefics3", heads),
    Fault("patches that do not turn", "qwen2-vl",
          grid(lambda old: replace(old, frequencies=old.frequencies * 0))),
    Fault("patches that turn as fast as others", "qwen2.5-vl",
          grid(lambda old: replace(old, frequencies=old.frequencies.flip(0)))),
    Fault("no windows", "qwen2.5-vl", windowed(lambda _: False)),
    Fault("windows in all layers", "qwen2.5-vl", windowed(lambda _: True)),
    Fault("windows one layer too late", "qwen2.5-vl", windowed(lambda number: number in (1, 3))),
    Fault("windows of another size", "qwen2.5-vl", grid(lambda old: replace(old, across=old.across + 1))),
    Fault("squares of a row's patches", "qwen2-vl", merged(by_row_of_squares)),
    Fault("no learned positions", "qwen3-vl", grid(lambda old: replace(old, places=None))),
    Fault("learned positions column by column", "qwen3-vl",
          grid(lambda old: replace(old, places=OtherPlaces(old.places)))),  # type: ignore[arg-type]
    Fault("features read one layer too late", "qwen3-vl",
          grid(lambda old: replace(old, taps={layer + 1: merger for layer, merger in old.taps.items()}))),
    Fault("features of the other layer", "qwen3-vl",
          grid(lambda old: replace(old, taps=dict(zip(old.taps, reversed(old.taps.values()), strict=True))))),
    Fault("no further features", "qwen3-vl-moe", lambda decoder: replace(decoder, deepstack=())),
    Fault("features one layer too late", "qwen3-vl-moe", lambda decoder: replace(decoder, deepstack=(1, 0))),
    Fault("patches that do not turn", "gemma4-vision",
          pooled(lambda old: replace(old, frequencies=old.frequencies * 0))),
    Fault("learned positions of rows for columns", "gemma4-vision",
          pooled(lambda old: replace(old, places=old.places.flip(0)))),
    Fault("features neither moved nor scaled", "gemma4-vision-clipped",
          pooled(lambda old: replace(old, standard=None))),
    Fault("no bounds of queries", "gemma4-vision-clipped", pooled(unbounded)),
    Fault("features not normalised", "gemma4-vision",
          pooled(lambda old: replace(old, projection_norm=lambda x: x))),
    Fault("sections in turn", "qwen2-vl", turned(lambda axes: [pair % 3 for pair in range(len(axes))])),
    Fault("axes in sections", "qwen3-vl", turned(lambda axes: sorted(axes))),
    Fault("rows for columns", "qwen3-vl-moe", turned(lambda axes: [(0, 2, 1)[axis] for axis in axes])),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faults_are_caught(fault: Fault, shelf: Shelf) -> None:
    case = BY_NAME[fault.case]
    decoder = shelf.decoder(case)
    assert agrees(shelf, case, decoder)
    with torch.inference_mode():
        assert not agrees(shelf, case, fault.decoder(decoder), fault.tiles)
