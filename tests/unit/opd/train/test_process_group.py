"""The device that ranks speak through, asked of the real system."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from opd.machine.address import GLOO_DEVICE
from opd.machine.network import find_network_device
from opd.train.process_group import set_gloo_device
from tests.unit.sources import ROOT


def test_loopback_is_reached_through_its_own_device() -> None:
    name = find_network_device("127.0.0.1")
    assert "127.0.0.1" in {one.address for one in psutil.net_if_addrs()[name]}


def test_an_address_of_this_machine_is_on_the_device_that_has_it() -> None:
    has = [
        (one.address, name)
        for name, every in psutil.net_if_addrs().items()
        for one in every
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    if not has:
        pytest.skip("this machine has loopback alone")
    assert [(address, find_network_device(address)) for address, _ in has] == has


def test_no_way_is_no_device() -> None:
    assert find_network_device("255.255.255.255") == ""  # a broadcast address, which the system refuses


def test_the_users_device_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_DEVICE, raising=False)
    set_gloo_device("255.255.255.255")
    monkeypatch.setenv(GLOO_DEVICE, "ib0")
    set_gloo_device("127.0.0.1")
    assert os.environ[GLOO_DEVICE] == "ib0"


def test_ranks_meet_behind_a_door_that_only_their_address_leads_to() -> None:
    """Two real ranks: they add up what each has, and listen on loopback and nowhere else."""
    told = subprocess.run(
        [sys.executable, "-c", MEETING], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert told.returncode == 0, told.stderr
    assert sorted(told.stdout.split()) == ["0:3.0:127.0.0.1", "1:3.0:127.0.0.1"]


MEETING = """
import os
from datetime import timedelta

import psutil
import torch

from opd.machine.network import open_listener
from opd.train.process_group import join_ranks

door = open_listener("127.0.0.1")
port, rank = door.getsockname()[1], int(os.fork() == 0)
if rank:
    door.close()
join_ranks("127.0.0.1", port, rank, 2, timedelta(seconds=60), None if rank else door)
sum_1 = torch.full((1,), rank + 1.0)
torch.distributed.all_reduce(sum_1)
hosts = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
os.write(1, f"{rank}:{sum_1.item()}:{','.join(hosts)}\\n".encode())  # at once: both write to one pipe
torch.distributed.barrier()
if not rank:  # the store that the other one speaks to is here
    assert os.wait()[1] == 0
torch.distributed.destroy_process_group()
"""
