"""The output file of a batch job: results in the order of the input, in whatever order they come.

A result that comes before its turn waits in a second file beside the output. So a job that is killed computes only the
requests in flight again. The second file is removed when the job is complete.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from rpc.batch.failures import Failures
from rpc.batch.line import Line

START = b'{"id": '
"""Start of every result."""


class OutputError(ValueError):
    """An output file that this job cannot go on with."""


class OutputFile:
    """The output of one job. Call `resume` once, then `add` with each result; use it as a context manager.

    Invariant: the output has the results of lines 0 to `next` - 1, and the second file has all later ones.

    Attributes:
        next: Index of the first line without a result in the output.
        failures: Lines that failed in earlier runs.

    Raises:
        OutputError: Another process writes to the file.
        OSError: A file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting_path = path, path.with_name(path.name + ".waiting")
        if not path.exists():
            self._waiting_path.unlink(missing_ok=True)  # it belongs to an output that was removed
        self._output = _open_locked(path)
        self._waiting_file: BinaryIO | None = None
        self._waiting: dict[int, str] = {}
        self.next = 0
        self.failures = Failures()

    def resume(self, lines: Iterable[Line]) -> int:
        """Reads the results of an earlier run, and checks that they belong to this input.

        Args:
            lines: Lines of the input, from the first.

        Returns:
            Number of these results.

        Raises:
            OutputError: They belong to another input; the files are unchanged.
        """
        torn = _torn_line(self._output)
        if not (torn.startswith(START) or START.startswith(torn)):
            raise OutputError(f"{self._path} was not written by a batch job. Name another --output")
        lines = iter(lines)
        for result in _whole_lines(self._output):
            self._check(self._path, result, next(lines, None), self.next)
            self.next += 1
        if self._waiting_path.exists():
            self._read_waiting(lines)
            _cut_torn_line(self._waiting_path)
        _cut_torn_line(self._path)
        count = self.next + len(self._waiting)
        self._write_ready()
        return count

    def _read_waiting(self, lines: Iterator[Line]) -> None:
        """Reads the second file. `lines` are those whose results are not in the output."""
        with self._waiting_path.open("rb") as file:
            for entry in _whole_lines(file):
                number, _, result = entry.partition("\t")
                if not number.isdecimal():
                    raise OutputError(f"{self._waiting_path} was not written by a batch job: move it away")
                if int(number) >= self.next:  # the others have moved to the output since
                    self._waiting[int(number)] = result
        last = max(self._waiting, default=-1)
        ahead = {line.index: line for line in itertools.takewhile(lambda line: line.index <= last, lines)}
        for index, result in self._waiting.items():
            self._check(self._waiting_path, result, ahead.get(index), index)

    def _check(self, path: Path, result: str, line: Line | None, index: int) -> None:
        values = _values_of(result)
        found = values.get("custom_id", values.get("id"))
        if line is None or found != line.id:
            there = "no such line" if line is None else f"id {line.id!r} there"
            where = f"{path}: result {index + 1} is of id {found!r}"
            raise OutputError(f"{where}, the input has {there}. Is it another job's? Name another --output")
        if _is_failure(values):
            self.failures.add(index, found)

    def has(self, index: int) -> bool:
        return index < self.next or index in self._waiting

    def add(self, index: int, result: str) -> None:
        """Writes a result to the output if its turn has come, else to the second file.

        When this returns, the result survives the end of this process.

        Args:
            index: Index of the line.
            result: A line of JSON, without its end.
        """
        if index == self.next:
            self._write(result)
            self._write_ready()
            return
        if self._waiting_file is None:
            self._waiting_file = self._waiting_path.open("ab")
        self._waiting[index] = result
        self._waiting_file.write(f"{index}\t{result}\n".encode())
        self._waiting_file.flush()

    def _write_ready(self) -> None:
        while self.next in self._waiting:
            self._write(self._waiting.pop(self.next))
        if self._waiting_file is not None and not self._waiting:
            self._waiting_file.truncate(0)  # all that it holds is in the output

    def _write(self, result: str) -> None:
        self._output.write(result.encode() + b"\n")
        self._output.flush()
        self.next += 1

    def complete(self) -> None:
        """Removes the second file, after the last result."""
        self._waiting_path.unlink(missing_ok=True)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        if self._waiting_file is not None:
            self._waiting_file.close()


def _open_locked(path: Path) -> BinaryIO:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputError(f"{path} is being written by another process") from None
    return file


def _whole_lines(file: BinaryIO) -> Iterator[str]:
    """Returns the lines that have an end. A last one without it was being written when its writer was killed."""
    file.seek(0)
    return (data.decode(errors="replace")[:-1] for data in file if data.endswith(b"\n"))


def _cut_torn_line(path: Path) -> None:
    with path.open("rb") as file:
        whole = sum(len(data) for data in file if data.endswith(b"\n"))
    os.truncate(path, whole)


def _torn_line(file: BinaryIO) -> bytes:
    file.seek(0)
    last = b""
    for last in file:  # noqa: B007 - the last one is wanted
        pass
    return b"" if last.endswith(b"\n") else last


def _is_failure(values: dict[str, Any]) -> bool:
    """Returns whether a result is that of a failed line, in either form."""
    response = values.get("response")
    return values.get("error") is not None or (isinstance(response, dict) and response.get("status_code") != 200)


def _values_of(result: str) -> dict[str, Any]:
    """Returns no values for a line that is no result."""
    try:
        values = json.loads(result)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
