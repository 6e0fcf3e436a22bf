"""The output file of a batch job: results in the order of the input, whatever order they come in.

A result that comes before its turn waits in a second file beside the output, so that a job that is killed computes
nothing twice but what was in flight. The second file goes when the job is complete.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from rpc.batch.lines import Line


class OutputError(ValueError):
    """An output file that this job cannot go on with."""


class Results:
    """Open it with the output's path, `resume` once, then `add` each result; use it as a context manager.

    Raises OutputError where another process writes to the file, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting_path = path, path.with_name(path.name + ".waiting")
        self._output = _open_locked(path)
        self._waiting_file: BinaryIO = self._waiting_path.open("a+b")
        self._waiting: dict[int, str] = {}
        self.next = 0
        """Index of the first line whose result is not in the output."""

    def resume(self, lines: Iterable[Line]) -> int:
        """Reads what an earlier run left; returns how many results that is. lines: the input's, from the first.

        Raises OutputError where the output is another input's.
        """
        lines = iter(lines)
        for result in _whole_lines(self._output):
            line = next(lines, None)
            found = _id_of(result)
            if line is None or found != line.id:
                where = f"{self._path} line {self.next + 1} is the result of id {found!r}"
                there = "no such line" if line is None else f"id {line.id!r} there"
                raise OutputError(f"{where}, the input has {there}: is it another job's? Name another --output")
            self.next += 1
        for entry in _whole_lines(self._waiting_file):
            index, _, result = entry.partition("\t")
            if not index.isdecimal():
                raise OutputError(f"{self._waiting_path} was not written by a batch job: it can be removed")
            if int(index) >= self.next:
                self._waiting[int(index)] = result
        count = self.next + len(self._waiting)
        self._write_ready()
        return count

    def has(self, index: int) -> bool:
        return index < self.next or index in self._waiting

    def add(self, index: int, result: str) -> None:
        """result: a line of JSON without its end. On disk when this returns, in its place or beside it."""
        if index == self.next:
            self._write(result)
            self._write_ready()
            return
        self._waiting[index] = result
        self._waiting_file.write(f"{index}\t{result}\n".encode())
        self._waiting_file.flush()

    def _write_ready(self) -> None:
        while self.next in self._waiting:
            self._write(self._waiting.pop(self.next))

    def _write(self, result: str) -> None:
        self._output.write(result.encode() + b"\n")
        self._output.flush()
        self.next += 1

    def complete(self) -> None:
        """Nothing waits any more: removes the second file."""
        self._waiting_path.unlink(missing_ok=True)

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        self._waiting_file.close()


def _open_locked(path: Path) -> BinaryIO:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputError(f"{path} is being written by another process") from None
    return file


def _whole_lines(file: BinaryIO) -> Iterable[str]:
    """From the start; what follows the last end of line was being written when the writer was killed, and is cut."""
    file.seek(0)
    whole = 0
    for data in file:
        if not data.endswith(b"\n"):
            break
        whole += len(data)
        yield data.decode(errors="replace")[:-1]
    file.seek(whole)
    os.truncate(file.fileno(), whole)


def _id_of(result: str) -> object:
    try:
        values = json.loads(result)
    except ValueError:
        return None
    return values.get("id") if isinstance(values, dict) else None
