"""Log lines of all of a server's processes: for people, or JSON objects for programs. None has text of a request."""

import atexit
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

OF_AN_ACTOR = re.compile(r"\((?P<actor>\w+) pid=(?P<pid>\d+)(?:, ip=(?P<node>[^)]+))?\) ")
LAST_SECONDS = 0.3  # time for the last lines: children may hold the pipe open, so its end may not come
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def set_up_logging(form: str = "text", process: str = "server", rank: int = 0) -> None:
    """Sets up the log of this process, to standard error; a later call replaces an earlier one.

    Args:
        form: Format of the lines: "text" or "json".
        process: Role of the process among a server's.
        rank: Rank of the process in its rank group.
    """
    handler, shown = logging.StreamHandler(sys.stderr), f"rank {rank}: " if rank else ""
    handler.setFormatter(_json(process, rank) if form == "json" else logging.Formatter(f"quire: {shown}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _json(process: str, rank: int) -> logging.Formatter:
    """Returns a formatter whose lines are JSON objects.

    Fields: timestamp (UTC), level, logger, process, rank, message, exc_info, and those of a line's `extra`.
    """
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname}{name}{message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger"},
        static_fields={"process": process} | ({"rank": rank} if rank else {}),
        timestamp=True,
    )


def redirect_output_as_json(process: str) -> Callable[[], None]:
    """Turns all later lines of this process's standard output and error into JSON lines on standard error.

    Ray prints lines of its actors, and its own, which are no log lines of Quire.

    Args:
        process: Role of the process, for lines that are no JSON.

    Returns:
        A function to call before the process ends: it writes the last lines.
    """
    real = os.dup(2)
    written, end = os.pipe()
    os.dup2(end, 1)
    os.dup2(end, 2)
    os.close(end)

    def pass_on() -> None:
        with os.fdopen(written, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                os.write(real, (json.dumps(to_json_object(line, process)) + "\n").encode())

    passing = threading.Thread(target=pass_on, name="quire-log-lines", daemon=True)
    passing.start()

    def finish() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(real, 1)
        os.dup2(real, 2)
        passing.join(LAST_SECONDS)

    atexit.register(finish)
    return finish


def to_json_object(line: str, process: str) -> dict[str, object]:
    """Returns the JSON object of a line.

    The line may be a JSON object already, and may have Ray's prefix of an actor's line, whose values become fields.
    """
    text = COLOURS.sub("", line).rstrip("\n")
    found = OF_AN_ACTOR.match(text)
    where: dict[str, object] = (
        {name: value for name, value in found.groupdict().items() if value is not None} if found else {}
    )
    rest = text[found.end() :] if found else text
    try:
        given, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        given = None
    if isinstance(given, dict):
        return given | where
    now = datetime.now(UTC).isoformat()
    return {"level": "INFO", "logger": "", "message": rest, "process": process, "timestamp": now} | where
