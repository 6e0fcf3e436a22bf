"""Tries a tokenizer in a process with limits before it is used here: the parent's side of `trial_process`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from model.errors import CheckpointError, named
from model.gguf.reader import GGUFFile
from model.gguf.split import is_gguf

MIB = 2**20
BASE_MEMORY, MEMORY_FACTOR = 1024 * MIB, 48
"""Bytes of address space to read a tokenizer: a base, and a multiple of its file's size, of which 20 times are used."""

BASE_SECONDS = 5  # processor time; one second more for each MiB of the file
WAIT = 60.0  # seconds, also where the process gets no processor

ENVIRONMENT = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "LC_ALL": "C",
    "RUST_BACKTRACE": "0",
}
"""Threads, arenas and locales would use address space; a backtrace of a failed allocation would deadlock."""


def try_tokenizer(directory: Path) -> None:
    """Reads the tokenizer of a directory and runs it on hard texts, in a process of its own.

    Takes 0.1 to 0.3 s, and as long again as the tokenizer takes to be read.

    Raises:
        CheckpointError: It cannot be read, takes time or memory out of proportion to a text, or ends its process.
    """
    path = next((p for name in ("tokenizer.json", "tokenizer.model") if (p := directory / name).exists()), directory)
    size, mapped = _sizes(path)
    memory, seconds = BASE_MEMORY + MEMORY_FACTOR * size + mapped, BASE_SECONDS + size // MIB
    command = [sys.executable, "-P", "-m", "model.inputs.trial_process", str(directory), str(memory), str(seconds)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module, by our own interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library reports panics there, with full stacks
            env={**os.environ, **ENVIRONMENT},
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{path} takes more than {WAIT:g} s to be tried") from None
    if done.returncode == 0:
        answer = json.loads(done.stdout)
        if "wrong" in answer:
            raise CheckpointError(answer["wrong"])
        if "failed" not in answer:
            return
        reason = answer["failed"]
    elif done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        reason = f"takes more than {seconds} s of processor time for texts of 64 KiB"
    else:
        reason = f"ends its process (code {done.returncode}), as where it needs more than 256 MiB for a text of 64 KiB"
    raise CheckpointError(f"{path} is a tokenizer that cannot be served safely: {named(reason)}")


def _sizes(path: Path) -> tuple[int, int]:
    """Returns the bytes that describe a tokenizer, and those that are mapped beside it. Raises CheckpointError."""
    if is_gguf(path):
        file = GGUFFile(path)
        return file.header, len(file.data)
    return path.stat().st_size if path.is_file() else 0, 0
