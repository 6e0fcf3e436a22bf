"""Bearer tokens of clients, in a file that only its owner can read."""

import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.access.reloaded import Reloaded
from rpc.private_files import read_private

LEAST = 16  # characters: shorter ones can be guessed
MOST_TOKENS = 1_000
TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
VISIBLE = re.compile(r"[\x21-\x7e]+")
BEARER = "bearer "
COMMENT = re.compile(r"(?:^|\s)#")


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity behind a token.

    Attributes:
        tenant: Tenant whose prefix cache and fair share of the engines it uses.
        operator: It may call AdminService.
    """

    tenant: str = DEFAULT_TENANT
    operator: bool = False


ANONYMOUS = Principal(operator=True)
"""Principal of all calls to a server without tokens."""


class AccessTokens:
    """The tokens of a file, which may change at any time.

    Lines are `TENANT TOKEN` or `TENANT TOKEN operator`. A # begins a comment at the start of a line or after a space.

    Args:
        path: The file.

    Raises:
        ValueError: It is not such a file, or others can read it.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        key = secrets.token_bytes(32)
        self._hash = partial(_hash, key)
        self._principals = Reloaded([path], lambda: read_principals(path, self._hash))

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants of the tokens that the file has now."""
        return frozenset(principal.tenant for principal in self._principals.current().values())

    def principal_of(self, metadata: Mapping[str, object]) -> Principal | None:
        """Returns the principal of a call with this metadata; None where it has no known token.

        Tokens are looked up by hashes with a key that only this process has. The time of a lookup thus shows a caller
        nothing of how much of its guess is right.
        """
        shown = metadata.get("authorization", "")
        if not isinstance(shown, str) or not shown.lower().startswith(BEARER):
            return None
        return self._principals.current().get(self._hash(shown[len(BEARER) :].strip()))


def read_principals(path: Path, hash_of: Callable[[str], bytes]) -> dict[bytes, Principal]:
    """Reads a token file.

    Args:
        path: The file.
        hash_of: Hashes a token.

    Returns:
        Principals by the hashes of their tokens.

    Raises:
        ValueError: It is not such a file, or others can read it.
        OSError: It cannot be read.
    """
    principals = dict[bytes, Principal]()
    try:
        lines = read_private(path, "--token-file").decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--token-file {path} has bytes that no token has") from None
    for number, line in enumerate(lines, 1):
        words = COMMENT.split(line, maxsplit=1)[0].split()
        if not words:
            continue
        where = f"--token-file {path}, line {number}"  # errors never quote the line, which has a token
        if len(words) not in (2, 3) or words[2:] not in ([], ["operator"]):
            raise ValueError(f"{where}: must be TENANT TOKEN, or TENANT TOKEN operator")
        tenant, token = words[:2]
        if not TENANT.fullmatch(tenant):
            raise ValueError(f"{where}: the tenant must be 1 to 64 of A-Z a-z 0-9 _ . -")
        if tenant == DEFAULT_TENANT:
            raise ValueError(
                f"{where}: {tenant!r} cannot be a tenant's name: it stands for all callers of a server without tokens"
            )
        if len(token) < LEAST or not VISIBLE.fullmatch(token):
            raise ValueError(f"{where}: the token must be at least {LEAST} visible ASCII characters")
        if hash_of(token) in principals:
            raise ValueError(f"{where}: the token stands in a line before it, too")
        principals[hash_of(token)] = Principal(tenant, len(words) == 3)
    if not principals:
        raise ValueError(f"--token-file {path} has no token")
    if len(principals) > MOST_TOKENS:
        raise ValueError(f"--token-file {path} has {len(principals)} tokens, must be at most {MOST_TOKENS}")
    return principals


def _hash(key: bytes, token: str) -> bytes:
    return hmac.digest(key, token.encode(), "sha256")
