"""The secret that page names are made with: one for all engines of a server, so that requests can be routed by them."""

import secrets
from pathlib import Path

from cache_manager.settings import CacheSettings

LEAST_SECRET_BYTES = 32


def read_secret(settings: CacheSettings) -> bytes:
    """The secret of page names. Raises ValueError for a file that others can read, or that is too short; OSError."""
    if settings.secret_file is None:
        return secrets.token_bytes(32)
    path = Path(settings.secret_file)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"--cache-secret-file {path} can be used by others than its owner: chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"--cache-secret-file {path} has {len(secret)} bytes, must have at least {LEAST_SECRET_BYTES}")
    return secret
