"""Addresses that a server listens on, and that clients call."""

import ipaddress


def is_loopback(host: str) -> bool:
    """localhost counts; other names do not, since they can come to mean another address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
