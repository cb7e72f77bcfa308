"""Set-up of the process group of a trainer's ranks, and choice of their network device."""

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
    """Join the other ranks at `address` and `port`; `server` is the socket that rank 0 listens on there, None on other ranks.

    By itself torch would listen on every address of the machine, at a port that another process may have taken meanwhile.
    """
    from torch import distributed

    if distributed.is_initialized():  # by an engine before, in the same process: a process has one group
        if server is not None:
            server.close()
        return
    set_gloo_device(address)
    listener: dict[str, Any] = {} if server is None else {"master_listen_fd": server.detach()}
    store = distributed.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, **listener)
    cuda = torch.cuda.is_available()
    # As DeepSpeed would: a rank alone has no peer to reach.
    device: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if cuda and world_size > 1 else {}
    distributed.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout, **device
    )


def set_gloo_device(address: str) -> None:
    """Let gloo speak through the device that reaches `address`, unless the user named one.

    By itself it takes the address that the machine's own name stands for. Debian's hosts file has 127.0.1.1 there, which no
    other machine reaches; and elsewhere it is an address beyond loopback, where the ranks of one machine need not listen.
    """
    device = os.environ.get(GLOO_DEVICE) or find_network_device(address)
    if device:
        os.environ[GLOO_DEVICE] = device


def find_network_device(address: str) -> str:
    """Return the name of the network device through which this machine reaches an address; empty if there is none.

    For one of the machine's own addresses it is the device that has it, such as loopback.
    """
    with socket.socket(_address_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # UDP: nothing is sent
        except OSError:
            return ""
        own = probe.getsockname()[0]
    devices = psutil.net_if_addrs()
    return next((name for name, has in devices.items() if any(entry.address.partition("%")[0] == own for entry in has)), "")


def _address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
