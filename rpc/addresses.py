"""Addresses that a server listens on, and that clients call."""

import ipaddress
import re

SERVER = re.compile(r"(?:[^\s:/\[\]]+|\[[^\s/\[\]]+\]):([0-9]{1,5})")


def is_loopback(host: str) -> bool:
    """Returns whether a host is a loopback address or localhost. Other names may resolve to another address later."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_server(address: str) -> None:
    """Raises ValueError where a client cannot call the address, since it is no HOST:PORT."""
    found = SERVER.fullmatch(address)
    if found is None or not 0 < int(found[1]) < 65536:
        raise ValueError(f"the server's address is {address!r}, must be HOST:PORT, such as 127.0.0.1:50051")
