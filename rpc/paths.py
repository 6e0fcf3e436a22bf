"""The directory of a model, which is local, the demo model's, or a download from the hub; or its GGUF file."""

import hashlib
from pathlib import Path

import model.demo
from model.errors import CheckpointError
from model.files import open_regular, read_file
from model.gguf.reader import GGUFFile
from model.gguf.split import SUFFIX, is_gguf, model_stem
from model.simulated.naming import checkpoint_directory, is_simulated, simulated_name

DEMO = "demo"
INPUTS = ["*.json", "*.model", "*.jinja"]
FILES = [*INPUTS, "*.safetensors"]
WEIGHTS_INDEX = ".safetensors.index.json"
MOST_INPUT = 64 * 2**20  # bytes of a file, also of one that is not read otherwise


def demo_directory() -> Path:
    """Returns the directory of the checkpoint that ships with Quire."""
    return Path(model.demo.__file__).parent / "checkpoint"


def model_directory(name: str) -> Path:
    """Returns a model's directory, after a download where it is on the hub, or its GGUF file.

    Args:
        name: "demo" for the demo model, "sim:..." for a simulated one, which has a tokenizer alone, else a local
            directory or GGUF file, else a name on the hub.

    Raises:
        CheckpointError: Neither directory nor file has this name, and the hub did not give it.
    """
    if name == DEMO:
        return demo_directory()
    if is_simulated(name):
        return checkpoint_directory()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == SUFFIX:
        if not path.exists():
            raise CheckpointError(f"--model {name}: no such file")
        return path.absolute()  # not resolved: the other parts of a model stand beside the link
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
    """Returns a digest, 32 bytes, of the files that a frontend reads: configuration, tokenizer and chat template.

    Raises:
        CheckpointError: A file cannot be read, or is too large.
    """
    digest = hashlib.blake2b(digest_size=32)
    if is_gguf(directory):
        header = GGUFFile(directory).header
        with open_regular(directory) as file:
            digest.update(file.read(header))
        return digest.digest()
    files = (path for pattern in INPUTS for path in directory.glob(pattern) if not path.name.endswith(WEIGHTS_INDEX))
    for path in sorted(files):
        content = read_file(path, MOST_INPUT)
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


def model_name(name: str, directory: Path) -> str:
    """Returns the name under which a model is served if the operator gives none."""
    if is_simulated(name):
        return simulated_name(name)
    return "quire-demo" if name == DEMO else model_stem(Path(name).name) or directory.name
