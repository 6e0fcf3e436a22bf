"""Makes the checkpoints that all engines run: shapes of real models, random weights, a tokenizer of one word an id.

python -m bench.peers.models DIRECTORY [MODEL ...]
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.shapes import MODELS, write_model


def make(directory: Path, name: str) -> Path:
    """Returns the checkpoint `name` in a directory, and writes it if it does not exist."""
    place = directory / name
    if not (place / "model.safetensors").exists():
        place.mkdir(parents=True, exist_ok=True)
        write_tokenizer(place, MODELS[name]["vocab_size"])
        write_model(place, MODELS[name])  # last, so that a directory with weights is complete
    return place


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Writes a tokenizer of one word an id, of as many as `vocabulary` says."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MODELS:
        print(make(Path(sys.argv[1]), chosen))
