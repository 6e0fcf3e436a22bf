"""The token that lets one into a Ray cluster. Whoever has it can run anything on every node of it."""

from collections.abc import Mapping
from pathlib import Path


def find_token(given: str | None, environment: Mapping[str, str]) -> str:
    """Path of the file that has it. given: by the operator; else it is where Ray looks for it. Raises ValueError where
    there is none, or others can read it.
    """
    place = given or environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    path = Path(place).expanduser()
    if not path.is_file():
        raise ValueError(
            f"a Ray cluster of several machines is joined with a token alone, and there is none in {place}. Start all "
            "its nodes with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, a file that is the same everywhere, and give "
            "it as --ray-token-file"
        )
    if path.stat().st_mode & 0o077:
        raise ValueError(f"the Ray token {path} can be read by others than its owner: chmod 600 {path}")
    if not path.read_text().strip():
        raise ValueError(f"the Ray token {path} is empty")
    return str(path)
