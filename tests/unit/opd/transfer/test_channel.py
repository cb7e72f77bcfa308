"""Nobody waits for ever in a channel: not for a process that is gone, nor for one that does nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from opd.machine.network import open_listener
from opd.transfer.channel import BroadcastGroup, Signals, TransferBroken, give_up, open_store
from opd.transfer.routes import MeetingPoint

CPU = torch.device("cpu")
MAX_S = 20.0
"""Anything that takes longer has hung."""


@contextmanager
def channel(group_size: int, timeout_s: float = 60.0) -> Iterator[tuple[MeetingPoint, Signals]]:
    """A meeting point, and the signals of the process that serves it."""
    listener = open_listener("127.0.0.1")
    meeting = MeetingPoint(
        address="127.0.0.1", port=listener.getsockname()[1], group_size=group_size, timeout_s=timeout_s
    )
    yield meeting, Signals(open_store(meeting, listener), timeout_s)


def seconds(action: Callable[[], Any]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def test_a_signal_is_taken_once() -> None:
    with channel(1) as (meeting, signals):
        other = Signals(open_store(meeting), 0.2)
        signals.post("a")
        other.take("a")
        with pytest.raises(TransferBroken, match="waited 0 s for a"):
            other.take("a")


def test_who_waits_for_a_signal_hears_that_the_channel_is_given_up() -> None:
    with channel(1) as (meeting, signals):
        threading.Timer(0.3, give_up, [meeting]).start()
        with pytest.raises(TransferBroken, match="another process was lost, a was waited for"):
            signals.take("a")


def test_a_member_that_never_comes_holds_up_nobody_who_gives_up() -> None:
    with channel(3) as (meeting, signals):
        threading.Timer(0.3, give_up, [meeting]).start()
        with pytest.raises(TransferBroken, match="all processes of the group"):
            BroadcastGroup(signals, meeting, 0, CPU)


def test_a_channel_whose_server_is_gone_is_given_up_in_silence() -> None:
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    give_up(MeetingPoint(address="127.0.0.1", port=port, group_size=1, timeout_s=0.5))


def join_all(meeting: MeetingPoint, first: Signals, size: int) -> list[BroadcastGroup]:
    def join(rank: int) -> BroadcastGroup:
        signals = first if rank == 0 else Signals(open_store(meeting), meeting.timeout_s)
        return BroadcastGroup(signals, meeting, rank, CPU)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def test_everybody_gets_the_bytes_of_rank_0() -> None:
    with channel(3) as (meeting, signals):
        groups = join_all(meeting, signals, 3)
        buffers = [torch.full((100,), rank, dtype=torch.uint8) for rank in range(3)]
        operations = [group.begin(buffer) for group, buffer in zip(groups, buffers, strict=True)]
        for group, operation in zip(groups, operations, strict=True):
            group.finish(operation)
        assert all(buffer.sum() == 0 for buffer in buffers)


def test_a_member_that_takes_nothing_is_waited_for_only_until_the_channel_is_given_up() -> None:
    """As NCCL waits for a process that is gone: the operation itself never ends."""
    with channel(3) as (meeting, signals):
        first, second, _third = join_all(meeting, signals, 3)
        data = torch.zeros(32 << 20, dtype=torch.uint8)
        operations = [(group, group.begin(data.clone())) for group in (first, second)]
        threading.Timer(0.5, give_up, [meeting]).start()
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(group.finish, operation) for group, operation in operations]
            broken = [one.exception(MAX_S) for one in waiting]
        assert any(isinstance(error, TransferBroken) for error in broken)


def test_a_member_that_leaves_is_noticed_at_once() -> None:
    with channel(2) as (meeting, signals):
        first, second = join_all(meeting, signals, 2)
        operation = first.begin(torch.zeros(32 << 20, dtype=torch.uint8))
        second.close()
        del second

        def wait() -> None:
            with pytest.raises(TransferBroken):
                first.finish(operation)

        threading.Timer(MAX_S, give_up, [meeting]).start()
        assert seconds(wait) < MAX_S
