"""Two ranks send, two fake engine processes take: one out of the broadcast, one out of the memory of the rank beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.models.weights import load_causal_lm
from opd.rollouts.engine_channel import EngineChannel
from opd.train import export
from opd.train.export import FileTensors
from opd.train.lora import list_plain_weights
from opd.train.rank_channel import RankChannel
from opd.transfer.channel import TransferBroken, give_up
from opd.transfer.routes import DirectPush, MeetingPoint, Route

Make = Callable[..., Path]
CPU = torch.device("cpu")
RANKS, WAIT_S = 2, 60.0
BUCKET = 40_000


class Steps:
    """A gather in which both ranks have to take part, with the same weights."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, self._note)
        self._gathered: list[tuple[int, ...]] = []
        self.differ: list[bool] = []
        """For each gather, True if the ranks gathered different weights in it."""

    def _note(self) -> None:
        self.differ.append(len(set(self._gathered)) > 1)
        self._gathered.clear()

    @contextmanager
    def gather(self, params: Sequence[Any]) -> Iterator[None]:
        self._gathered.append(tuple(id(param) for param in params))
        self._barrier.wait(WAIT_S)
        yield


class Ends:
    """Both ends of a channel, each in a thread."""

    def __init__(self, model_dir: Path, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        lm = load_causal_lm(model_dir, torch.float32)
        self.tensors = [FileTensors(lm, list_plain_weights(lm), torch.bfloat16, complete=True) for _ in range(RANKS)]
        self.ranks = [RankChannel(rank, CPU) for rank in range(RANKS)]
        routes = (Route(process=0, group_rank=1), Route(process=1, trainer_rank=1))
        port = self.ranks[0].listen("127.0.0.1")
        self.meeting = MeetingPoint(address="127.0.0.1", port=port, group_size=2, timeout_s=WAIT_S)
        engines = [pool.submit(EngineChannel, self.meeting, route, CPU) for route in routes]
        joined = [pool.submit(rank.join, self.meeting, (number,) * number) for number, rank in enumerate(self.ranks)]
        assert [one.result(WAIT_S) for one in joined] == ["", ""]
        self.engines = [one.result(WAIT_S) for one in engines]

    def plan(self, number: int) -> DirectPush:
        planned = [rank.plan(own, BUCKET) for rank, own in zip(self.ranks, self.tensors, strict=True)]
        assert planned[0][0] == planned[1][0], "all ranks plan alike"
        (_, nothing), (_, handles) = planned
        assert nothing == {} and {process: len(own) for process, own in handles.items()} == {1: 2}
        return DirectPush(number=number, plan=planned[0][0], handles=handles)

    def send(self, number: int, *, keeps: bool = False) -> list[Future[str]]:
        return [self._pool.submit(rank.send, number, keeps=keeps) for rank in self.ranks]

    def take(self, engine: int, push: DirectPush) -> Future[dict[str, torch.Tensor]]:
        return self._pool.submit(take_all, self.engines[engine], push)


def take_all(channel: EngineChannel, push: DirectPush) -> dict[str, torch.Tensor]:
    """Take a push as an engine does, and check each bucket against the plan."""
    held: dict[str, torch.Tensor] = {}
    for slots, tensors in zip(push.plan.buckets, channel.take_buckets(push), strict=True):
        assert [name for name, _ in tensors] == [slot.name for slot in slots]
        for slot, (_, tensor) in zip(slots, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (slot.shape, getattr(torch, slot.dtype))
        held |= dict(tensors)
    return held


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setattr(export, "gather_parameters", steps.gather)
    return steps


@pytest.fixture
def ends(steps: Steps, tmp_path: Path, make_mixture_dir: Make) -> Iterator[Ends]:
    """Of a mixture, some of whose groups need several buckets."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # as a handle that needs no open socket, like a GPU's
    with ThreadPoolExecutor(2 * RANKS) as pool:
        yield Ends(make_mixture_dir(tmp_path / "student", "qwen3_moe"), pool)
    torch.multiprocessing.set_sharing_strategy(before)


def wanted(ends: Ends, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The tensors of the files, in their order."""
    monkeypatch.setattr(export, "gather_parameters", lambda params: threading.Lock())
    path.mkdir()
    export.write_model(ends.tensors[0], path)
    return load_file(path / "model.safetensors")


def refuse_other(found: dict[str, torch.Tensor], files: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(files)
    for name, tensor in files.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_both_engines_take_what_the_files_have_push_after_push(
    ends: Ends, steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number in (1, 2):
        push = ends.plan(number)
        taking, sending = [ends.take(engine, push) for engine in (0, 1)], ends.send(number, keeps=number == 2)
        assert [one.result(WAIT_S) for one in sending] == ["", ""]
        found += [one.result(WAIT_S) for one in taking]
    assert len(push.plan.buckets) > 4 and any(len(slots) > 1 for slots in push.plan.buckets)
    assert steps.differ == [False] * (2 * len(ends.tensors[0].groups)), "both ranks gather the same in the same order"
    kept = [ends.ranks[0].kept_bucket(index) for index in range(len(push.plan.buckets))]
    found.append({name: tensor for bucket in kept for name, tensor in bucket.tensors()})
    files = wanted(ends, tmp_path / "files", monkeypatch)
    for one in found:
        refuse_other(one, files)


@pytest.mark.parametrize("engine", [0, 1])
def test_when_an_engine_stops_in_the_middle_all_ranks_gather_to_the_end(ends: Ends, steps: Steps, engine: int) -> None:
    """Otherwise one rank would wait for ever in a gather that the other has left."""
    push = ends.plan(1)
    plan = push.plan
    short = replace(push, plan=replace(plan, buckets=plan.buckets[:2]))
    taking, sending = [ends.take(engine, short), ends.take(1 - engine, push)], ends.send(1, keeps=True)
    taking[0].result(WAIT_S)
    give_up(ends.meeting)  # the driver does, when it hears of a death
    problems = [one.result(WAIT_S) for one in sending]
    assert any(problems)
    assert steps.differ == [False] * len(ends.tensors[0].groups)
    assert isinstance(taking[1].exception(WAIT_S), TransferBroken | None)
    assert len([ends.ranks[0].kept_bucket(index) for index in range(len(plan.buckets))]) == len(plan.buckets)


def test_a_rank_in_no_channel_says_so_and_gathers_all_the_same(
    steps: Steps, tmp_path: Path, make_model_dir: Make
) -> None:
    lm = load_causal_lm(make_model_dir(tmp_path / "student"), torch.float32)
    ranks = [RankChannel(rank, CPU) for rank in range(RANKS)]
    for rank in ranks:
        rank.plan(FileTensors(lm, list_plain_weights(lm), torch.float32, complete=True), BUCKET)
    with ThreadPoolExecutor(RANKS) as pool:
        sending = [pool.submit(rank.send, 1, keeps=False) for rank in ranks]
        assert [one.result(WAIT_S) for one in sending] == ["this rank is in no channel", ""]
