"""Bearer tokens: a file that only its owner can read says whose each of them is."""

import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cache_manager.page_names import DEFAULT_TENANT
from rpc.access.reloaded import Reloaded
from rpc.private_files import read_private

LEAST = 16  # characters: shorter ones can be guessed
MOST_TOKENS = 1_000
TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
VISIBLE = re.compile(r"[\x21-\x7e]+")
BEARER = "bearer "
COMMENT = re.compile(r"(?:^|\s)#")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. tenant: whose cache and share of the engines it uses. operator: may do what AdminService does."""

    tenant: str = DEFAULT_TENANT
    operator: bool = False


ANYBODY = Caller(operator=True)
"""Where there are no tokens."""


class Tokens:
    """Of a file with lines `TENANT TOKEN` or `TENANT TOKEN operator`; # begins a comment at the start of a line or
    after a space. It may change at any time.

    Raises ValueError where it is not such a file, or others can read it, OSError.
    """

    def __init__(self, path: Path) -> None:
        key = secrets.token_bytes(32)
        self._hash = partial(_hash, key)
        self._callers = Reloaded([path], lambda: read_callers(path, self._hash))

    @property
    def tenants(self) -> frozenset[str]:
        """Whose tokens the file has now."""
        return frozenset(caller.tenant for caller in self._callers.current().values())

    def caller(self, metadata: Mapping[str, object]) -> Caller | None:
        """Of a call with this metadata; None where it shows no token of these.

        Tokens are looked up as hashes with a key that only this process has: how long that takes says nothing about how
        much of a guess is right, as nobody knows the hash of a guess.
        """
        shown = metadata.get("authorization", "")
        if not isinstance(shown, str) or not shown.lower().startswith(BEARER):
            return None
        return self._callers.current().get(self._hash(shown[len(BEARER) :].strip()))


def read_callers(path: Path, hash_of: Callable[[str], bytes]) -> dict[bytes, Caller]:
    """By the hashes of their tokens. Raises ValueError, OSError."""
    callers = dict[bytes, Caller]()
    try:
        lines = read_private(path, "--token-file").decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--token-file {path} has bytes that no token has") from None
    for number, line in enumerate(lines, 1):
        words = COMMENT.split(line, maxsplit=1)[0].split()
        if not words:
            continue
        where = f"--token-file {path}, line {number}"  # and never what stands there
        if len(words) not in (2, 3) or words[2:] not in ([], ["operator"]):
            raise ValueError(f"{where}: must be TENANT TOKEN, or TENANT TOKEN operator")
        tenant, token = words[:2]
        if not TENANT.fullmatch(tenant):
            raise ValueError(f"{where}: the tenant must be 1 to 64 of A-Z a-z 0-9 _ . -")
        if tenant == DEFAULT_TENANT:
            raise ValueError(f"{where}: {tenant!r} is nobody's name: it is everybody's where there are no tokens")
        if len(token) < LEAST or not VISIBLE.fullmatch(token):
            raise ValueError(f"{where}: the token must be at least {LEAST} visible ASCII characters")
        if hash_of(token) in callers:
            raise ValueError(f"{where}: the token stands in a line before it, too")
        callers[hash_of(token)] = Caller(tenant, len(words) == 3)
    if not callers:
        raise ValueError(f"--token-file {path} has no token")
    if len(callers) > MOST_TOKENS:
        raise ValueError(f"--token-file {path} has {len(callers)} tokens, must be at most {MOST_TOKENS}")
    return callers


def _hash(key: bytes, token: str) -> bytes:
    return hmac.digest(key, token.encode(), "sha256")
