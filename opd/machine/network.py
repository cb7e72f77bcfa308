"""Listening sockets and network devices of this machine."""

from __future__ import annotations

import socket

import psutil


def open_listener(address: str) -> socket.socket:
    """Open a socket that listens on a free port of this address and no other. Raises: OSError."""
    return socket.create_server((address, 0), family=_address_family(address))


def find_network_device(address: str) -> str:
    """Return the name of the network device through which this machine reaches `address`; empty if there is none.

    If the machine itself has the address, that is the device with the address, such as loopback.
    """
    with socket.socket(_address_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent: for UDP this only chooses a route, and with it our address
        except OSError:
            return ""
        source = probe.getsockname()[0]
    devices = psutil.net_if_addrs()
    return next(
        (name for name, has in devices.items() if any(entry.address.partition("%")[0] == source for entry in has)),
        "",
    )


def _address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
