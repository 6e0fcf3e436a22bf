"""`quire replay`: runs a recording again and compares the plans, or simulates it with other settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rpc.cli.options import build, with_settings
from rpc.cli.what_if import show_changes
from rpc.simulation.changes import Changes

if TYPE_CHECKING:
    from scheduler.replaying import Recording

EXCERPT_STEPS = 1000

File = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, show_default=False, help="Recording of `quire serve --record`."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@with_settings({Changes: "Simulation of the recorded time, with changed settings"})
def replay(
    file: File,
    replicas: Annotated[
        int, typer.Option(min=1, help="Number of engines that are simulated. They share the requests of this one.")
    ] = 1,
    excerpt: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            show_default=False,
            help="Write the last steps to this new file, a recording of their own for a bug report or a test, and "
            "replay that.",
        ),
    ] = None,
    excerpt_steps: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Number of steps that --excerpt writes. Unset: 1000."),
    ] = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Run a recording through the scheduler of this version, and compare each plan with the recorded one.

    Exits with status 1 at the first plan that differs. With changed settings the recorded time is simulated instead:
    the same requests, the same scheduler, and steps that take as long as the recorded ones did.
    """
    from rpc.engines.recordings import read_recording
    from scheduler.replaying import RecordingError, Replay

    changes = build(Changes, values)
    if excerpt is None and excerpt_steps is not None:
        fail(ValueError("--excerpt-steps is the length of an excerpt: it needs --excerpt"))
    if changes.any or replicas > 1:
        if excerpt is not None:
            fail(ValueError("--excerpt writes what was recorded: it takes no changed settings"))
        try:
            show_changes(read_recording(file), changes, replicas, as_json)
        except (OSError, ValueError) as error:  # also a RecordingError
            fail(error)
        return
    try:
        recording = read_recording(file)
        if excerpt is not None:
            recording = _written(recording, excerpt, excerpt_steps or EXCERPT_STEPS)
        run = Replay(recording)
        found = run.run()
    except (OSError, RecordingError) as error:
        fail(error)
    shown: dict[str, Any] = {
        "steps": run.steps,
        "requests": run.requests,
        "seconds": run.seconds,
        "ended": recording.ended or None,
        "raised": None if run.raised is None else f"{type(run.raised).__name__}: {run.raised}",
        "difference": None,
    }
    if found is not None:
        shown["difference"] = {
            "step": found.step, "array": found.name, "recorded": found.recorded, "replayed": found.replayed,
        }  # fmt: skip
    if as_json:
        print(json.dumps(shown))
    elif found is None:
        print(f"the same plans: {run.steps:,} steps, {run.requests:,} requests, {run.seconds:.1f} s")
        if run.raised is not None:
            print(f"the last call ended with {shown['raised']}, as recorded")
        if recording.ended:
            print(f"the recording ended early: {recording.ended}")
    else:
        print(f"step {found.step} differs in {found.name}")
        print(f"  recorded: {_shown(found.recorded)}")
        print(f"  replayed: {_shown(found.replayed)}")
    if found is not None:
        raise typer.Exit(1)


def _written(recording: "Recording", path: Path, steps: int) -> "Recording":
    """Writes the last steps of a recording, and returns them. Raises OSError or RecordingError."""
    from rpc.engines.recordings import read_part, write_recording
    from scheduler.excerpt import last_steps

    write_recording(path, last_steps(recording, steps))
    typer.echo(f"{path}: {path.stat().st_size:,} bytes", err=True)
    return read_part(path)


def _shown(value: Any) -> str:
    """Returns a value of a plan as text."""
    if isinstance(value, str) and ":" in value:
        rows, checksum = value.split(":")
        return f"{rows} rows, checksum {checksum}"
    return "none" if value is None else json.dumps(value)


def fail(error: BaseException) -> NoReturn:
    """Prints an error as one line, and exits with status 1."""
    typer.echo(f"quire: {error}", err=True)
    raise typer.Exit(1)
