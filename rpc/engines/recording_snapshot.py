"""Adds to a part of a recording the snapshot that it begins with, in a process that gives way to all others.

Arguments: the file of the part before it, whose replay ends in that state, and the file of the part, which its engine
goes on adding lines to. Ends with its parent, and with status 1 and a line where there is no snapshot.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from rpc.engines.reaping import die_with_parent
from rpc.engines.recordings import read_part
from scheduler.recording import snapshot_line
from scheduler.replaying import RecordingError, Replay
from scheduler.snapshot import SnapshotError


def state_after(before: Path) -> str:
    """Returns a line with the state of the scheduler as a part ends.

    Raises:
        RecordingError: It is no recording, or the replay differs.
        SnapshotError: Its scheduler has what no snapshot has.
        OSError: It cannot be read.
    """
    replay = Replay(read_part(before))
    difference = replay.run()
    if difference is not None:
        raise RecordingError(f"the replay of {before} differs at step {difference.step}; please report this")
    return snapshot_line(replay.scheduler) + "\n"


def main(before: str, part: str) -> int:
    """Adds the snapshot. Returns the exit status."""
    die_with_parent()
    os.nice(19)
    with suppress(OSError):  # where memory is short, the kernel ends this process and no engine
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_APPEND)
        line = state_after(Path(before)).encode()
        # One write: the engine adds lines meanwhile, and the kernel puts each write behind the last one as a whole.
        if os.write(descriptor, line) < len(line):
            os.write(descriptor, b"\n")  # so that it breaks no line of the engine's
            raise OSError(f"the snapshot does not fit on the disk of {part}")
    except (OSError, RecordingError, SnapshotError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
