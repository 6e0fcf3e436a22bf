"""Makes the checkpoints that all engines run: shapes of real models with random weights.

The tokenizer has one word an id. Structured output needs tokens as models have them: a byte-level BPE.

python -m bench.peers.models DIRECTORY [MODEL ...]
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.byte_pairs import END
from bench.byte_pairs import write_tokenizer as train_tokenizer
from bench.shapes import MODELS, write_model


def make(directory: Path, name: str) -> Path:
    """Returns the checkpoint `name` in a directory, and writes it if it does not exist."""
    place = directory / name
    if not (place / "model.safetensors").exists():
        place.mkdir(parents=True, exist_ok=True)
        write_tokenizer(place, MODELS[name]["vocab_size"])
        write_model(place, MODELS[name])  # last, so that a directory with weights is complete
    return place


def make_for_text(directory: Path, name: str, dtype: str) -> Path:
    """Returns the checkpoint `name` with a byte-level BPE whose token 0 ends a text; see `make`.

    Args:
        directory: Directory of checkpoints.
        name: Name of the shape.
        dtype: Type that engines compute in. The weights are the same bfloat16 numbers in each.
    """
    place = directory / f"{name}-text-{dtype}"
    if not (place / "model.safetensors").exists():
        place.mkdir(parents=True, exist_ok=True)
        train_tokenizer(place, MODELS[name]["vocab_size"])
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (place / "tokenizer_config.json").write_text(json.dumps(config))
        write_model(place, MODELS[name] | {"eos_token_id": 0, "torch_dtype": dtype})
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
