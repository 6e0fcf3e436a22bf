"""Where a model lies: a directory, the demo model, or a name on the Hugging Face hub."""

import hashlib
from pathlib import Path

import model.demo
from model.errors import CheckpointError
from model.files import read_file

DEMO = "demo"
INPUTS = ["*.json", "*.model", "*.jinja"]
FILES = [*INPUTS, "*.safetensors"]
WEIGHTS_INDEX = ".safetensors.index.json"
MOST_INPUT = 64 * 2**20  # bytes of a file, also of one that is not read otherwise


def demo_directory() -> Path:
    """The checkpoint that ships with Quire."""
    return Path(model.demo.__file__).parent / "checkpoint"


def model_directory(name: str) -> Path:
    """A local directory if there is one, the demo model for "demo", else a download from the hub.

    Raises CheckpointError where there is neither.
    """
    if name == DEMO:
        return demo_directory()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"--model {name}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # many kinds: no network, no such model, a gated model, a bad name
        raise CheckpointError(
            f"--model {name}: no such directory, and the Hugging Face hub did not give it: "
            f"{type(error).__name__}: {error}"
        ) from None


def inputs_digest(directory: Path) -> bytes:
    """[32] of all that a frontend reads of a model: its configuration, tokenizer and chat template.

    Raises CheckpointError for what is not to be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    files = (path for pattern in INPUTS for path in directory.glob(pattern) if not path.name.endswith(WEIGHTS_INDEX))
    for path in sorted(files):
        content = read_file(path, MOST_INPUT)
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


def model_name(name: str, directory: Path) -> str:
    """What a model is called where no name was given."""
    return "quire-demo" if name == DEMO else Path(name).name or directory.name
