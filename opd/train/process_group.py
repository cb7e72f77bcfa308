"""Process group of a trainer's ranks: how they join, and through which network device they speak."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from opd.machine.address import GLOO_DEVICE
from opd.machine.network import find_network_device


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
