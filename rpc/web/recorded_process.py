"""Explains one request of a server's recordings, in a process of its own that gives way to all others.

Arguments: the file of --record, the start of the server in seconds since the Unix epoch, the request's number. Standard
output is JSON: the timeline, or with exit status FAILED the fields of a `RequestFailed`. Ends by SIGALRM after SECONDS,
and with its parent.
"""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpc.engines.explained import timeline_json
from rpc.engines.reaping import die_with_parent
from rpc.engines.recordings import behind_part_before, part_before, read_part
from rpc.frontend.errors import RequestFailed
from rpc.link.coalesce import LOCAL, LOCAL_BITS
from scheduler.explaining import Explanation
from scheduler.replaying import Recording, RecordingError

SECONDS = 180  # a replay makes 1,000 to 2,500 steps a second
MOST_BYTES = 128 * 2**20  # of a recording; it takes twice as much memory
MOST_ANSWER = 8 * 2**20  # bytes
FAILED = 3
OWN = 1
"""Connection of the server's own frontend: the first to an engine in a process, and 0 to one on a thread."""


def explained(file: Path, began: float, attempt: int) -> dict[str, Any]:
    """Returns the timeline of an attempt of the server's own frontend, with the name of its recording.

    Requests of other frontends have longer numbers, as `quire explain` shows them where numbers meet.

    Args:
        file: File of --record.
        began: Start of the server, in seconds since the Unix epoch. Older files are another run's.
        attempt: The frontend's number of the attempt.

    Raises:
        RequestFailed: It is in no recording here, or that cannot be explained within bounds.
        OSError: A recording cannot be read.
    """
    large = list[Path]()
    for path in _recordings(file, began):
        with suppress(RecordingError):  # an engine that starts has not written its first line yet
            if (part := _within_bounds(path)) is None:
                large.append(path)
                continue
            asked = next((one for one in part.attempts if _number(one) == attempt), None)
            if asked is None:
                continue
            if asked in part.live and _fits(path):
                part = behind_part_before(path, part) or part
            found = _timeline(path.name, part, asked)
            if found["ended"] is not None or not any(part_before(one) == path for one in large):
                return found
    if large:
        names = ", ".join(one.name for one in large)
        message = f"{names}: more than {MOST_BYTES >> 20} MiB to read, which only `quire explain` replays"
        raise RequestFailed("FAILED_PRECONDITION", "RECORDING_TOO_LARGE", message)
    message = "the request is in no recording here: that of its engine has ended, was removed or is on another machine"
    raise RequestFailed("NOT_FOUND", "NOT_RECORDED", message)


def _recordings(file: Path, began: float) -> list[Path]:
    """Returns the recordings of a server's run, as `open_recording` names them."""
    name = re.compile(re.escape(file.name) + r"(\.\d+)?(\.previous)?")
    there = sorted(one for one in file.parent.iterdir() if name.fullmatch(one.name) and one.is_file())
    return [one for one in there if one.stat().st_mtime >= began]


def _within_bounds(path: Path) -> Recording | None:
    """Returns a part, behind the one before it where it has no snapshot; None for more than may be read."""
    if path.stat().st_size > MOST_BYTES:
        return None
    part = read_part(path)
    if part.replays:
        return part
    return behind_part_before(path, part) or part if _fits(path) else None


def _fits(path: Path) -> bool:
    """Whether a part and the one before it, if that is there, are small enough together."""
    there = [one for one in (path, part_before(path)) if one.exists()]
    return sum(one.stat().st_size for one in there) <= MOST_BYTES


def _number(attempt: int) -> int:
    return attempt & LOCAL if attempt >> LOCAL_BITS <= OWN else attempt


def _timeline(name: str, recording: Recording, asked: int) -> dict[str, Any]:
    found = Explanation(recording, asked)
    difference = found.replay.difference
    if asked not in found.timelines:
        message = f"the replay of {name} differs from the recording before the request came: see `quire replay`"
        raise RequestFailed("FAILED_PRECONDITION", "REPLAY_DIFFERS", message)
    numbers = {attempt: _number(attempt) for attempt in recording.attempts}
    differs = None if difference is None else difference.step
    return {
        "recording": name,
        "differs_at_step": differs,
        **timeline_json(found, numbers, found.timelines[asked]),
    }


def main(file: str, began: str, attempt: str) -> int:
    """Writes the answer. Returns the exit status."""
    die_with_parent()
    signal.alarm(SECONDS)
    os.nice(19)
    with suppress(OSError):  # where memory is short, the kernel ends this process and no engine
        Path("/proc/self/oom_score_adj").write_text("1000")
    status = 0
    try:
        answer = json.dumps(explained(Path(file), float(began), int(attempt)))
        if len(answer) > MOST_ANSWER:
            message = "the timeline has too many intervals for the dashboard: `quire explain` shows all"
            raise RequestFailed("FAILED_PRECONDITION", "TIMELINE_TOO_LONG", message)
    except RequestFailed as error:
        answer, status = json.dumps(asdict(error)), FAILED
    sys.stdout.write(answer)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
