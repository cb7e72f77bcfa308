"""How a trainer's ranks join into one process group, and through which network device they speak."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
import torch

from opd.machine.address import GLOO_DEVICE


def open_listener(address: str) -> socket.socket:
    """Open a socket that listens on a free port of this address and no other. Raises: OSError."""
    return socket.create_server((address, 0), family=_address_family(address))


def join_ranks(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta, server: socket.socket | None
) -> None:
    """Join the other ranks at rank 0's `address` and `port`. `server` is rank 0's listening socket there; None on other ranks.

    torch gets an open socket from us, because by default it listens on every address of the machine, and at a port that another
    process may have taken meanwhile.
    """
    from torch import distributed

    if distributed.is_initialized():  # an earlier engine of this process has joined; a process has one group
        if server is not None:
            server.close()
        return
    set_gloo_device(address)
    listener: dict[str, Any] = {} if server is None else {"master_listen_fd": server.detach()}
    store = distributed.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, **listener)
    cuda = torch.cuda.is_available()
    # As DeepSpeed does: it names a device only if there are other ranks to reach.
    device: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if cuda and world_size > 1 else {}
    distributed.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout, **device
    )


def set_gloo_device(address: str) -> None:
    """Set the network device of gloo to the one that reaches `address`, unless the user has named one.

    By default gloo takes the address to which the machine's own name resolves. With Debian's hosts file that is 127.0.1.1, which
    no other machine reaches. On other systems it is an address beyond loopback, where ranks of a single machine need not listen.
    """
    device = os.environ.get(GLOO_DEVICE) or find_network_device(address)
    if device:
        os.environ[GLOO_DEVICE] = device


def find_network_device(address: str) -> str:
    """Return the name of the network device through which this machine reaches `address`; empty if there is none.

    If the machine itself has the address, that is the device with the address, such as loopback.
    """
    with socket.socket(_address_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent: for UDP this only chooses a route, and with it our address
        except OSError:
            return ""
        own = probe.getsockname()[0]
    devices = psutil.net_if_addrs()
    return next(
        (name for name, has in devices.items() if any(entry.address.partition("%")[0] == own for entry in has)), ""
    )


def _address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
