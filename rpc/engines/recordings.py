"""Files of the flight recorder: an engine writes one, commands read it."""

import logging
import os
import secrets
import weakref
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from scheduler.blueprint import Blueprint
from scheduler.recording import Recorder
from scheduler.replaying import Recording, RecordingError
from scheduler.settings import RecordSettings

KEY_BYTES = 32

log = logging.getLogger("quire.engines")


def open_recording(path: Path) -> tuple[Path, int]:
    """Opens a new file for its owner alone: `path`, or with .1, .2, ... behind its name where files exist.

    So engines that have the same settings, and one that takes the place of another, write files of their own.

    Returns:
        Its path, and a file descriptor to write to.

    Raises:
        OSError: It cannot be made.
    """
    names = chain([path.name], (f"{path.name}.{number}" for number in count(1)))
    while True:
        one = path.with_name(next(names))
        with suppress(FileExistsError):
            return one, os.open(one, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def start_recorder(blueprint: Blueprint, settings: RecordSettings) -> Recorder | None:
    """Returns a recorder that writes a new file; None where the settings name none.

    Raises:
        OSError: The file cannot be made.
    """
    if settings.file is None:
        return None
    path, descriptor = open_recording(Path(settings.file))
    log.info("what goes into the scheduler is recorded in %s", path)

    def write(line: str) -> None:
        # Each line at once: what was recorded survives the process, whatever ends it. A write takes 2 us.
        os.write(descriptor, line.encode() + b"\n")

    recorder = Recorder(blueprint, settings, secrets.token_bytes(KEY_BYTES), write)
    weakref.finalize(recorder, os.close, descriptor)  # a server may start an engine in place of another
    return recorder


def read_recording(path: Path) -> Recording:
    """Returns the recording in a file.

    Raises:
        RecordingError: It is none of this version; the message names the file.
        OSError: It cannot be read.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            return Recording.parse(lines)
    except UnicodeDecodeError:
        raise RecordingError(f"{path}: this is no text, so no recording") from None
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
