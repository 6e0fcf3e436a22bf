"""The key of block hashes: one for all engines of a server, so that requests can be routed by their block hashes."""

import secrets
from pathlib import Path

from cache_manager.settings import CacheSettings
from rpc.private_files import read_private

LEAST_SECRET_BYTES = 32


def read_secret(settings: CacheSettings) -> bytes:
    """Returns the key of the settings' file; a random one where they name no file.

    Raises:
        ValueError: Others can read the file, or it is too short.
        OSError: The file cannot be read.
    """
    if settings.secret_file is None:
        return secrets.token_bytes(32)
    path = Path(settings.secret_file)
    secret = read_private(path, "--cache-secret-file")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"--cache-secret-file {path} has {len(secret)} bytes, must have at least {LEAST_SECRET_BYTES}")
    return secret
