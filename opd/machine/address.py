"""Network addresses as a user writes them, and the hosts to which connections need no encryption."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that no other machine can reach."""
LOOPBACK_DEVICE = "lo"
"""Linux's name of the network device with these addresses."""
GLOO_DEVICE = "GLOO_SOCKET_IFNAME"
NCCL_DEVICE = "NCCL_SOCKET_IFNAME"
"""Environment variables from which gloo and NCCL read the name of the network device to use."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    """A name or an IP address; an IPv6 address is without brackets."""
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address | None:
    """Parse `HOST:PORT` or `[IPv6]:PORT`; None for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        return None
    return Address(match[1] or match[2], int(match[3]))


def parse_url(text: str) -> tuple[str, Address] | None:
    """Return scheme and address of `grpc://HOST:PORT` or `grpc+tls://HOST:PORT`; None for anything else."""
    scheme, _, host_and_port = text.partition("://")
    address = parse_address(host_and_port)
    return (scheme, address) if scheme in ("grpc", "grpc+tls") and address and address.port else None


def strip_secret(url: str) -> str:
    """Return the address without the user and password that it may hold, so that it can be shown."""
    scheme, mark, authority = url.rpartition("://")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}"
