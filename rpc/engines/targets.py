"""The file that lists the engines' metrics addresses for Prometheus (`file_sd_configs`)."""

import json
import logging
import os
from pathlib import Path

from rpc.frontend.replicas import Replicas

log = logging.getLogger("quire.metrics")


class TargetsFile:
    """Writes one target for each live engine, with the labels replica, epoch and place."""

    def __init__(self, path: Path, replicas: Replicas) -> None:
        self._path, self._replicas = path, replicas

    async def follow(self) -> None:
        """Writes the file at each change of the engines, until cancelled."""
        while True:
            version = self._replicas.version
            try:
                self.write()
            except OSError as error:  # a full disk, say: the next change is another try
                log.error("--metrics-targets %s cannot be written: %s", self._path, error)
            await self._replicas.wait_newer(version)

    def write(self) -> None:
        """Replaces the file in one step, as Prometheus may read it at any moment. Raises OSError."""
        targets = [
            {
                "targets": [replica.client.info.metrics],
                "labels": {
                    "replica": str(replica.number),
                    "epoch": str(replica.epoch),
                    "place": replica.client.place,
                },
            }
            for replica in sorted(self._replicas, key=lambda replica: replica.number)
            if replica.usable and replica.client is not None and replica.client.info.metrics
        ]
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.write_text(json.dumps(targets, indent=2) + "\n")
        new.replace(self._path)

    def clear(self) -> None:
        """Writes a file without targets, at the server's end. Raises OSError."""
        self._path.write_text("[]\n")
