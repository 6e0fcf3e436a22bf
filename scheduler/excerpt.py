"""The last steps of a recording as a recording of their own: for a bug report, or as a test."""

import json
from dataclasses import replace

from scheduler.recording import part_header, snapshot_line
from scheduler.replaying import Recording, RecordingError, Replay
from scheduler.snapshot import SnapshotError


def last_steps(recording: Recording, steps: int) -> list[str]:
    """Returns the lines of a recording that begins with the scheduler as it was before the last steps.

    Args:
        recording: The recording. It is replayed up to there.
        steps: Number of the last steps; of a shorter recording the result has all.

    Raises:
        RecordingError: The replay up to there differs, or its scheduler has what no snapshot has.
    """
    begin = _begin(recording, steps)
    is_whole = not begin and not recording.part
    made = [
        part_header(recording.name, 0 if is_whole else max(recording.part, 1), recording.tokens, recording.blueprint)
    ]
    if not is_whole:
        made.append(_state_after(replace(recording, lines=recording.lines[:begin])))
    made += [line for line in recording.lines[begin:] if line]
    if recording.ended:
        made.append(json.dumps({"ended": recording.ended}))
    return [line if line.endswith("\n") else line + "\n" for line in made]


def _begin(recording: Recording, steps: int) -> int:
    """Returns the place in `recording.lines` of the plan of the first of the last steps."""
    for place in range(len(recording.lines) - 1, -1, -1):
        line = recording.lines[place]
        if line and json.loads(line).get("plan") is not None:
            steps -= 1
            if not steps:
                return place
    return 0


def _state_after(recording: Recording) -> str:
    """Returns the line with the state of the scheduler as a recording ends."""
    replay = Replay(recording)
    if (difference := replay.run()) is not None:
        raise RecordingError(f"its replay differs at step {difference.step}, so the state after that is not known")
    try:
        return snapshot_line(replay.scheduler)
    except SnapshotError as error:
        raise RecordingError(str(error)) from None
