"""Files of the flight recorder: an engine writes two, commands read them."""

import errno
import logging
import os
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from scheduler.blueprint import Blueprint
from scheduler.recording import Recorder, RecordingEnd
from scheduler.replaying import Recording, RecordingError
from scheduler.settings import RecordSettings

KEY_BYTES = 32
SNAPSHOTS = "rpc.engines.recording_snapshot"

log = logging.getLogger("quire.engines")


def part_before(path: Path) -> Path:
    """Returns the file of the part before the current one of a recording."""
    return path.with_name(f"{path.name}.previous")


def open_recording(path: Path) -> tuple[Path, int]:
    """Opens a new file for its owner alone: `path`, or with .1, .2, ... behind its name where files exist.

    So engines that have the same settings, and one that takes the place of another, write files of their own.

    Returns:
        Its path, and a file descriptor that adds to it.

    Raises:
        OSError: It cannot be made.
    """
    names = chain([path.name], (f"{path.name}.{number}" for number in count(1)))
    while True:
        one = path.with_name(next(names))
        with suppress(FileExistsError):
            if not part_before(one).exists():
                return one, _new_file(one)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class RecordingFiles:
    """Files of one recording: the current part, and the one before it. See `scheduler.recording.RecordingParts`.

    Attributes:
        path: File of the current part.
    """

    def __init__(self, path: Path) -> None:
        """Makes the first file, as `open_recording`. Raises OSError."""
        self.path, self._descriptor = open_recording(path)
        self._replay: subprocess.Popen[str] | None = None

    def write(self, line: str) -> None:
        # Each line at once: what was recorded survives the process, whatever ends it. A write takes 2 us.
        encoded = line.encode() + b"\n"
        if os.write(self._descriptor, encoded) < len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def begin_part(self, header: str) -> bool:
        if self._replay is not None:
            if self._replay.poll() is None:
                return False
            ended, self._replay = self._replay, None
            if said := _complaint(ended):
                raise RecordingEnd(f"no snapshot can be taken: {said}")
        before, there = part_before(self.path), None
        with suppress(FileNotFoundError):
            there = os.stat(self.path)
        if there is None or not os.path.samestat(there, os.fstat(self._descriptor)):
            raise RecordingEnd(f"{self.path} was removed or renamed")
        os.replace(self.path, before)
        descriptor = _new_file(self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self.write(header)
        # A process of its own: a replay in this one would hold the interpreter of the engine's loop for minutes.
        self._replay = subprocess.Popen(  # noqa: S603 this package's own module
            (sys.executable, "-P", "-m", SNAPSHOTS, str(before), str(self.path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        # It is reaped as it ends, not as the next part begins. `poll` and `wait` may run at once.
        threading.Thread(target=self._replay.wait, name="quire-recording", daemon=True).start()
        return True

    def close(self) -> None:
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        if self._replay is not None:
            self._replay.kill()
            self._replay.communicate()


def _complaint(ended: subprocess.Popen[str]) -> str:
    """Returns why a process failed; "" where it did not."""
    _, said = ended.communicate()
    if ended.returncode < 0:
        return f"its replay was ended by signal {-ended.returncode}, as where memory is short"
    return (said.strip().splitlines() or [f"exit status {ended.returncode}"])[-1] if ended.returncode else ""


def start_recorder(blueprint: Blueprint, settings: RecordSettings) -> Recorder | None:
    """Returns a recorder that writes a new file; None where the settings name none.

    Raises:
        OSError: The file cannot be made.
    """
    if settings.file is None:
        return None
    files = RecordingFiles(Path(settings.file))
    log.info("what goes into the scheduler is recorded in %s", files.path)
    recorder = Recorder(blueprint, settings, secrets.token_bytes(KEY_BYTES), files)
    weakref.finalize(recorder, files.close)  # a server may start an engine in place of another
    return recorder


def write_recording(path: Path, lines: Iterable[str]) -> None:
    """Writes the lines of a recording to a new file, for its owner alone. Where that fails, no file is left.

    Args:
        path: The file.
        lines: Are asked for once the file is there.

    Raises:
        OSError: It cannot be made or written, or there is a file already.
    """
    descriptor = _new_file(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_recording(path: Path) -> Recording:
    """Returns the recording in a file. A part without its snapshot comes behind the part before it, if that is there.

    Raises:
        RecordingError: It is none of this version; the message names the file.
        OSError: It cannot be read.
    """
    found = read_part(path)
    if found.replays or (whole := behind_part_before(path, found)) is None:
        return found
    return whole


def behind_part_before(path: Path, part: Recording) -> Recording | None:
    """Returns a part behind the one before it, as one recording; None where that is not there, or does not replay."""
    with suppress(OSError, RecordingError):
        before = read_part(part_before(path))
        return before.joined(part) if before.replays else None
    return None


def read_part(path: Path) -> Recording:
    """Returns the part of a recording in a file. Raises RecordingError or OSError, as `read_recording`."""
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            return Recording.parse(lines)
    except UnicodeDecodeError:
        raise RecordingError(f"{path}: this is no text, so no recording") from None
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
