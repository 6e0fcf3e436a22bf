"""Files that only their owner may read: tokens and secrets."""

from pathlib import Path


def read_private(path: Path, what: str) -> bytes:
    """Returns the content of a private file.

    Args:
        path: The file.
        what: Flag or noun that errors name it by.

    Raises:
        ValueError: Others than its owner can use it.
        OSError: It cannot be read.
    """
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{what} {path} can be used by others than its owner: chmod 600 {path}")
    return path.read_bytes()


def read_token(path: Path, what: str) -> str:
    """Returns the token of a private file, as `read_private`; raises ValueError where it has none."""
    try:
        token = read_private(path, what).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} has bytes that no token has") from None
    if not token:
        raise ValueError(f"{what} {path} is empty")
    return token
