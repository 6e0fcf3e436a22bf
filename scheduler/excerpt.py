"""The last steps of a recording as a recording of their own: for a bug report, or as a test."""

import json
from collections.abc import Iterator
from dataclasses import replace

from scheduler.recording import part_header, snapshot_line
from scheduler.replaying import Recording, RecordingError, Replay
from scheduler.snapshot import SnapshotError


def last_steps(recording: Recording, steps: int) -> Iterator[str]:
    """Yields the lines of a recording that begins with the scheduler as it was before the last steps.

    Args:
        recording: The recording. It is replayed up to there.
        steps: Number of the last steps; of a shorter recording the result has all.

    Raises:
        RecordingError: The replay up to there differs, its scheduler has what no snapshot has, or a line is no JSON
            object.
    """
    planned = [number for number, call in recording.calls() if call.get("plan") is not None]
    begin = planned[-steps] - 2 if len(planned) > steps else 0  # the first line is the header
    is_whole = not begin and not recording.part
    part = 0 if is_whole else max(recording.part, 1)
    yield part_header(recording.name, part, recording.tokens, recording.blueprint) + "\n"
    if not is_whole:
        yield _state_after(replace(recording, lines=recording.lines[:begin])) + "\n"
    yield from filter(None, recording.lines[begin:])
    if recording.ended:
        yield json.dumps({"ended": recording.ended}) + "\n"


def _state_after(recording: Recording) -> str:
    """Returns the line with the state of the scheduler as a recording ends."""
    replay = Replay(recording)
    if (difference := replay.run()) is not None:
        raise RecordingError(f"its replay differs at step {difference.step} already: ask for more steps")
    if replay.raised is not None:
        raise RecordingError(f"its scheduler raised {replay.raised!r} before the last of these steps")
    try:
        return snapshot_line(replay.scheduler)
    except SnapshotError as error:
        raise RecordingError(str(error)) from None
