"""The fork server: a process that has imported what an engine needs, and forks when its server asks.

An import of torch takes an engine two seconds; a fork of a process that has done it takes 10 ms, and shares its memory
(160 MiB) until one of the two writes there.

Invariant: this process has one thread, no CUDA context and no gRPC object, for a fork copies memory and no thread. It
imports modules and calls nothing of them, and does not serve where an import has started a thread.

Protocol: it is started as `python -m rpc.engines.fork_server MODULE... ROOM` with a socket as standard input, on which
it writes a line, `{"ready": true}` or `{"error": why}`. A newline on the socket asks for a process. Four descriptors
come with it: the process's standard input, output and error, and a second socket. On the second socket comes a line of
JSON, a `ForkOrder`. The answer goes there too: `{"pid": 12}` from the process itself, or `{"error": why}`. The end of
the first socket, or of the server's process, ends the fork server.

Two differences from multiprocessing's fork server: no pickle is read or written, and forked processes are children of
the server. They outlive the fork server, and the server itself sees their exit codes.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rpc.engines.engine_process import ignore_signals
from rpc.engines.forks import READY, ForkOrder, read_line
from rpc.engines.reaping import die_with_parent
from rpc.heap import freeze_heap

DESCRIPTORS = 4


def serve(orders: socket.socket, server: int) -> Callable[[], None]:
    """Forks for each order, until the server closes `orders`.

    Args:
        orders: Socket that orders come from.
        server: Process id of the server.

    Returns:
        The function that a forked process is to run. It returns in forked processes only; the fork server ends in here.
    """
    while True:
        _, descriptors, _, _ = socket.recv_fds(orders, 1, DESCRIPTORS)
        if len(descriptors) < DESCRIPTORS:
            sys.exit(0)  # the server has closed its end, or ended
        *standard, connection = descriptors
        with socket.socket(fileno=connection) as answers:
            line = read_line(answers)
            if line and _fork(answers):
                orders.close()
                return partial(_become, ForkOrder.from_json(line.decode()), standard, answers.dup(), server)
        for descriptor in standard:
            os.close(descriptor)


def _fork(answers: socket.socket) -> bool:
    """Forks a process whose parent becomes the server. Returns True in that process.

    A process between the two ends at once, which makes an orphan of the forked one; the kernel gives an orphan to the
    nearest process above it that adopts them, which is the server. The forked one waits until that is done: the pipe's
    other end is closed after the process between has been reaped.
    """
    adopted, between_is_gone = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        _answer(answers, {"error": f"the fork server cannot fork: {error.strerror}"})
        os.close(adopted)
        os.close(between_is_gone)
        return False
    if between:
        os.close(adopted)
        _, status = os.waitpid(between, 0)
        os.close(between_is_gone)
        if status:
            why = os.strerror(os.waitstatus_to_exitcode(status))
            _answer(answers, {"error": f"the fork server cannot fork: {why}"})
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    os.close(between_is_gone)
    os.read(adopted, 1)
    os.close(adopted)
    return True


def _become(order: ForkOrder, standard: Sequence[int], answers: socket.socket, server: int) -> None:
    """Runs the order in a forked process."""
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)  # the server ended before `die_with_parent`, so the kernel would not end this process
    if order.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for target, descriptor in enumerate(standard):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _open_streams()
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv[:] = order.arguments
    set_title(order.title)
    with answers:
        if not _answer(answers, {"pid": os.getpid()}):
            os._exit(1)  # the one that asked for the process has gone
    importlib.import_module(order.module).main()


def _open_streams() -> None:
    """Makes Python's standard streams anew: the old ones are set up for the files of the fork server's descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        by_line = 1 if os.isatty(number) or name == "stderr" else -1
        mode = "r" if name == "stdin" else "w"
        stream = open(number, mode, by_line, before.encoding, before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _answer(answers: socket.socket, answer: dict[str, object]) -> bool:
    """Sends an answer, and returns whether it could be sent."""
    try:
        answers.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return False
    return True


def set_title(words: Sequence[str]) -> None:
    """Changes what `ps` and `pgrep -f` show as this process's command line, as setproctitle(3) does on Linux.

    The kernel reads it from the memory in which the process got its arguments. If the last byte of that is not zero, it
    takes all up to the first zero for the command line.
    """
    of_process = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(of_process[45]), int(of_process[46])  # arg_start and arg_end, see proc_pid_stat(5)
    if start and end > start:
        title = " ".join(words).encode()[: end - start - 2]
        ctypes.memmove(start, title.ljust(end - start - 1, b"\0") + b".", end - start)


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    die_with_parent()
    ignore_signals()
    orders, server = socket.socket(fileno=os.dup(0)), os.getppid()
    modules = sys.argv[1:-1]
    set_title([sys.executable, "-m", "rpc.engines.fork_server"])
    for module in modules:
        with suppress(ImportError):  # the module that is to run reports what it lacks
            importlib.import_module(module)
    freeze_heap()  # all forks share the present objects: no collection writes to them
    if (count := thread_count()) > 1:
        _answer(orders, {"error": f"importing {', '.join(modules)} started {count - 1} threads"})
        sys.exit(1)
    _answer(orders, {READY: True})
    serve(orders, server)()


if __name__ == "__main__":
    main()
