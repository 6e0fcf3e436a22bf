"""Files that only their owner may read: tokens and secrets."""

from pathlib import Path


def read_private(path: Path, what: str) -> bytes:
    """What is in it. what: it is, for people. Raises ValueError where others can use it, OSError."""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{what} {path} can be used by others than its owner: chmod 600 {path}")
    return path.read_bytes()


def read_token(path: Path, what: str) -> str:
    """As `read_private`; raises ValueError where there is no token in it, too."""
    try:
        token = read_private(path, what).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} has bytes that no token has") from None
    if not token:
        raise ValueError(f"{what} {path} is empty")
    return token
