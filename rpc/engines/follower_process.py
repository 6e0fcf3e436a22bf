"""The process of a follower on the machine of its rank 0, see `rpc.engines.group`.

It reads its rank and configuration as one line of JSON from its standard input, and ends when that input ends.
"""

import json
import logging
import os
import sys
import threading
from contextlib import suppress

from model.errors import RankLost
from model.parallel.group import LEADER_ENDED
from rpc.engines.reaping import die_with_parent
from rpc.settings import EngineConfig

log = logging.getLogger("quire.engines")

MOST_BYTES = 2**20  # bytes of the line


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MOST_BYTES:
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)  # rank 0 has ended
        line += byte
    return bytes(line)


def _lost(why: str) -> None:
    if why != LEADER_ENDED:
        log.warning("%s", why)
    os._exit(1)  # the thread that computes may wait for a rank that never comes


def main() -> None:
    die_with_parent()
    from rpc.engines.engine_process import ignore_signals, run_and_report
    from rpc.observe.logs import set_up_logging

    ignore_signals()
    line = json.loads(_read_line())
    rank, size = line["rank"], line["size"]
    set_up_logging(json.loads(line["config"])["log_format"], "engine", rank)
    threading.Thread(target=_end_with_input, name="quire-parent", daemon=True).start()

    def run() -> None:
        from rpc.engines.follower import run_follower  # here, since it imports torch, which takes seconds

        config = EngineConfig.from_json(line["config"])
        with suppress(RankLost):  # rank 0 says why
            run_follower(config, rank, size, line["address"], bytes.fromhex(line["token"]), _lost)

    why = run_and_report(run)
    if why:
        log.error("%s", why)
    sys.stderr.flush()
    os._exit(1 if why else 0)  # a thread of the model may hang


if __name__ == "__main__":
    main()
